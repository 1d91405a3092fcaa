"""The sections that measure kernels: the hardware's ceilings, each kernel's speed, and other libraries' attention.

`ncu.py` profiles one of the same kernel cases under Nsight Compute. Imports `devices` and `reporting`. Start reading
in `kernel_cases.py`, which lists the cases by name.
"""
