"""A GPU as the rest of the pass sees it: its memory, one stream, and kernels that it compiles and launches.

Start with `device`, the interface, and `launcher`, which describes a kernel; `cuda_device` and `cupy_launcher`
implement them with torch and CuPy. `transfers` packs the copies of each step, `device_choice` maps --gpu to a GPU,
`link_probe` measures copies, `nvrtc` compiles kernels, with or without a GPU, and `cubin_cache` keeps them. This
package imports no other package of the pass.
"""
