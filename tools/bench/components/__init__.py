"""Measurements of one part of Penstock by itself: no server, no HTTP, mostly no model.

Each subcommand of `penstock bench` has a module of its name here, in this order: options, measurement, table, aims.
`grammar_cases` and `synthetic_tokenizer` are the input of `mask_cost`; `quantization` scores texts by `scored_model`.
"""
