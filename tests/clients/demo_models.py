"""The models of the server, and texts whose order its embedding model knows."""

GENERATION, EMBEDDING, RERANK = "penstock-demo", "penstock-demo-embed", "reranker"
QUESTION = "How do I join paths?"
TEXTS = ["Join two or more path components.", "Return the current time in seconds.", "Sort a list in place."]
"""The first one answers QUESTION."""
