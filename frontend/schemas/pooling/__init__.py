"""The bodies and answers of endpoints whose result is vectors or scores: OpenAI's, Cohere's and Jina's, vLLM's, TEI's.

`common` has what they share; the others have one family each. May import the rest of `schemas`.
"""
