"""Models in GGUF files. A file is presented as a checkpoint directory in the Hugging Face layout.

`directory.py` makes that directory in the cache: config.json (`config.py`, `encoders.py`), tokenizer.json and chat
template (`tokenizer.py`, `splits.py`) from the file's metadata, and links to the files themselves. So the rest of the
server knows nothing of GGUF; only `weights.py` opens the links. `header.py` reads metadata and the places of tensors,
`names.py` translates their names, `projector.py` reads a vision part; `cached_directories.py` bounds the cache.
`checkpoint/formats/ggml.py` has the block types.
"""
