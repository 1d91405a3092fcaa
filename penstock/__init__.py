"""Penstock: an LLM server for one GPU, or for the CPU.

`main` is the `penstock` command, `serve` and `commands` are its subcommands, and `process` is what every process uses.
`frontend`, `backend`, `shm` and `tools` are links to the folders of these names at the top of the repository; `tools`,
the laboratory, is not in the wheel. Nothing of ours is imported as `frontend` or `tools`: those names belong to other
people's projects.
"""
