"""The contract between the processes: messages, the link, shared memory, and the client that anyone may use.

Frontend, backend and tools import this package; it imports none of them, and neither torch nor cupy. From top to
bottom: `client`, `link`, `buffers`, `memory`, then `messages` and `process`; each imports only what is below it. Start
with `messages`, then follow a request from `client.client` to `link.backend_link`.
"""
