"""Reports about a worker's requests: Prometheus metrics, log lines, and the timings that answers carry.

Nothing here imports any other part of the frontend. The counters themselves are on the boards in `penstock.shm.memory`.
Start with `request_log`.
"""
