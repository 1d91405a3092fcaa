"""Shared buffers in the engine: clients on this machine receive outputs and give prompts without copies through
messages.

`options` decides at start which kinds of memory and which contents are offered. `shared_outputs` writes logits and
hidden states of a step to the clients' buffers; `shared_prompts` gives embeddings from them to the pass.

The buffers themselves are in `penstock.shm.buffers`. May import `scheduling` for types, `forward_pass` and
`penstock.shm`.
"""
