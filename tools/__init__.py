"""The `penstock` command and the tools that measure the server.

`main` lists the subcommands. `serve` runs backend and frontend under one supervisor, and `welcome` is its message when
they are ready. `upgrade` replaces the backends of a running server. `bench` measures a server or a part of it,
`gpu_check` checks and measures the CUDA decoder, `random_model` writes checkpoints for benchmarks, and `demo_model`
trained the model that is served by default.

May import frontend, backend and shm; nothing imports it.
"""
