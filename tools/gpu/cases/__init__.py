"""The kernels' test cases: inputs, float64 references and tolerances, on CPU tensors.

A case takes a `Launcher`. Tests pass the emulator; on a GPU `gpu-check` passes `MirrorLauncher`, which copies the
tensors to the GPU and back for each launch. The same code therefore judges a kernel on both. Imports the backend, and
no other package of gpu-check. Start with `catalogue`, which puts the lists of all kernels' checks together.
"""
