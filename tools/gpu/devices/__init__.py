"""Parts that sections share: the device, its clock, memory and profiler, caches, steps without an engine.

`device_context.py` bundles the device, the clock and the memory counter, so that tests run each section on an emulated
device. Imports the backend and `results`. Start with `device_context`.
"""
