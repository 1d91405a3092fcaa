"""The model's operations on the GPU, behind the `Ops` interface of `penstock.backend.passes.ops.interface`.

Start with `cuda_ops`, which combines the others. `matmul` multiplies with torch, `elementwise` launches the kernels
that treat each row alone, `activations` sizes the buffers, and `device_weights` places the weights. This package may
import `attention`, `step`, `kv_cache` and `device`.
"""
