"""`penstock chaos`: clients, processes and model files misbehave, and then the books must balance.

`plan` draws requests and faults from a seed. `client` sends one request and misbehaves as planned. `server` starts the
attacked server, with `proxies` before it (each process is a `child`), and `faults` kills, stops and restarts it.
`ledger` decides for each request how it ended and whether that was right; `counters` and `census` compare the server's
own numbers and its processes with their values before. `run` connects these parts, `report` writes the result.
`bad_models` loads damaged models without a server.
"""
