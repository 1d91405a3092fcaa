"""Parts that sections share: the device, its clock and memory, models of random weights, steps without an engine.

`device_context.py` bundles the device, the clock and the memory counter, so that tests run each section on an emulated
device. Imports the backend, and no other package of gpu-check. Start with `device_context`.
"""
