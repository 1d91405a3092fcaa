"""Structured output: turns a request's JSON schema, regex or grammar into a mask over the vocabulary at every step.

A schema takes this path. `grammar_queue` holds the request while it is compiled. `grammar_compiler` has the results.
`compile_pool` compiles in children (`compiler_process`, `compile_child`, and `grammars`, which calls llguidance;
`grammar_costs` measures their use). `constraints` then follows the sequence token by token, and `masks` fills the
step's masks from it just before sampling; `late_masks` fills slow ones. `token_bits` has the bit operations.

May import `forward_pass` and `penstock.shm`. Start with `grammar_queue`.
"""
