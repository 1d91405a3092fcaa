"""What every process of ours needs: options, logging, the supervisor of child processes, the socket's default path.

The package imports nothing of ours. Start with `options` for a command, in `supervisor.py` for `penstock
serve`.
"""
