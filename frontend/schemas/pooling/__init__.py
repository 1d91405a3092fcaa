"""The bodies and answers of endpoints whose result is vectors or scores: OpenAI's, Cohere's and Jina's, vLLM's, TEI's.

`common` has the shared fields; each other module has one family. May import the rest of `schemas`.
"""
