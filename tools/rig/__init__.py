"""The engine without processes: its real loop, scheduler and messages, between stand-ins for its link and its device.

`engine_rig` builds it; `links` has the link, `executors` the device, whose steps run one by one or by a simulated
clock. Used by `penstock replay`, benchmarks, the GPU check and tests. It imports the backend and `penstock.shm`.
"""
