"""HTTP in, HTTP out: the processes that clients talk to.

`main` owns the listening socket and supervises workers; `worker` is one process; `app` holds its routes. The packages
are layers, top to bottom: endpoints, generation, formats, parsing, text, schemas, access, transport and telemetry. A
layer imports only what is below it. Nothing here imports the backend, torch or cupy. Start with `app`.
"""
