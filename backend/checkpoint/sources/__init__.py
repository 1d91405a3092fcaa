"""Sources of models other than directories: the hub and wheels of the package index. Also chooses among GGUF files.

It imports only `files` of this package; `hub` above it chooses the source.
"""
