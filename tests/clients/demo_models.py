"""The models of the servers, texts whose order its embedding model knows, and the script of a model without weights."""

GENERATION, EMBEDDING, RERANK, REAL = "penstock-demo", "penstock-demo-embed", "reranker", "smollm2"
QUESTION = "How do I join paths?"
TEXTS = ["Join two or more path components.", "Return the current time in seconds.", "Sort a list in place."]
"""The first one answers QUESTION."""

COMMAND, OUTPUT = "echo done-$((7300 + 19))", "done-7319"
ANSWER = "The command has run."
"""The command that the scripted model (scripted_pass.py) has an agent run, and its answer to the command's output."""
