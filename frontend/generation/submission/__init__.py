"""Submits a request: from a decoded body and its prompts to one token stream per choice.

`sampling` decides how tokens are drawn, `limits` how many there may be and what ends them. `submit` puts them together.
Embeddings and scores: `pooled_inputs` makes tokens, `pooled_run` sends them to the backend in portions and collects the
results, `pooled_scores` computes scores from logits and vectors.

Values that do not fit the model raise ApiError with the body's field. May import the other modules of `generation`,
schemas and what lies below. Start with `submit` or `pooled_run`.
"""
