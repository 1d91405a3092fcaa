"""Adapters of rows on the CPU: `torch_adapters` for the operations in torch, `native_adapters` for the native ones,
whose kernels are in kernels/lora.h.
"""
