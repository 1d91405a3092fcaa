"""Structured output: turns a request's JSON schema, regex or grammar into a mask over the vocabulary at every step.

A schema takes this path. `grammar_queue` holds the request while it is compiled. `grammar_cache` has the results.
`compile_pool` compiles in children (`compiler_process`, `compile_child`, and `compile_grammar`, which calls llguidance
with what `lark_source` and `exact_integers` write; `grammar_costs` measures their use). `constraints` then follows the
sequence token by token, and `late_masks` fills the step's masks from it just before sampling.

May import `forward_pass` and `penstock.shm`. Start with `grammar_queue`.
"""
