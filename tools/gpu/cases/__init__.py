"""The kernels' test cases: inputs, float64 references and tolerances, on CPU tensors.

A case takes a `Launcher`. Tests pass the emulator; on a GPU `gpu-check` passes `MirrorLauncher`, which copies the
tensors to the GPU and back for each launch. The same code therefore judges a kernel on both. Imports the backend, and
no other package of gpu-check. Each package here lists the checks of its kernels in its own `catalogue`; start with the
`catalogue` beside them, which puts the lists together.
"""
