"""What items share: the device, its clock and memory, caches, steps without an engine, and another checkout's modules.

`device_context.py` bundles the device, the clock and the memory counter, so that tests run items on an emulated device.
Imports the backend. Start with `device_context`.
"""
