"""The models behind this frontend: which a request means, whether it is awake, and whether it has room."""
