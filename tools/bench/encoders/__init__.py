"""`penstock bench embeddings`: servers and libraries that turn texts into vectors, with the same inputs in one run.

inputs.py draws the texts, sending.py measures a server, library_process.py a library of another Python environment,
through the script library_peer.py, which imports nothing of ours. Start with `embeddings` in embeddings.py.
"""
