"""Embeddings and scores: from a request's inputs to tokens, to the backend in portions, to vectors and scores.

`inputs` makes tokens, `run` sends them and collects the results, `scores` computes scores from logits and vectors.
Start with `run`.
"""
