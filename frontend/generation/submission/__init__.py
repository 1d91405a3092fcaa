"""Submits a request: from a decoded body and its prompts to one token stream per choice.

`sampling` decides how tokens are drawn, `limits` how many there may be and what ends them, `constraints` which tokens
are allowed. `submit` puts them together. Values that do not fit the model raise ApiError with the body's field. May
import the other modules of `generation` that choices need, schemas and what lies below. Start with `submit`.
"""
