"""Where models come from, beside directories: the hub, wheels of the package index, and GGUF files among others.

It imports only `files` of this package; `hub` above it chooses the source.
"""
