"""The operations that a device offers to models, and what is made for them on every device.

`interface` is what the decoder's order of operations calls; `cpu` and `cuda` implement it. Imports no device.
"""
