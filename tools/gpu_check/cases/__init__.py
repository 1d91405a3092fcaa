"""What each kernel must compute: cases with references in float64, on tensors of the CPU.

A case takes a `Launcher`: tests hand in the emulator, `gpu-check` one that mirrors the tensors on the GPU for each
launch. So one and the same code decides on both whether a kernel is right.
"""
