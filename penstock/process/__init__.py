"""Parts that every process uses: options, logging, a supervisor of child processes, the default socket path.

The package imports nothing else of Penstock. To follow a command, start with `options`; to follow `penstock serve`,
start with `supervisor`.
"""
