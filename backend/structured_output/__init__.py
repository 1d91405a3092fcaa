"""Structured output: how a request's JSON schema, regex or grammar becomes a mask over the vocabulary at every step.

A schema takes this way: `grammar_queue` holds the request while `grammar_compiler` compiles it (llguidance).
`constraints` then follows the sequence token by token, and `masks` fills the step's masks from it just before sampling.
`token_bits` has the bit operations. May import `forward_pass` and `penstock.shm`. Start with `grammar_queue`.
"""
