"""The engine without processes: its real loop, scheduler and messages, between stand-ins for its link and its device.

`engine_rig` builds it; `links` has the link, `executors` the device, whose steps run by a simulated clock or as a
subclass says. `penstock replay`, benchmarks, the GPU check and tests use it. It imports the backend and `penstock.shm`.
"""
