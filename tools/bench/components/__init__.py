"""Measurements of one part of Penstock by itself: no server, no HTTP, mostly no model.

Each subcommand of `penstock bench` has a module of its name here, in this order: options, measurement, table, aims.
`scheduling` and `channel_sweep` run the backend's real loop, the first with stand-ins for link and device
(`bare_loop`), the second on a simulated clock (`simulation`, `simulated_device`). `grammar_cases` and
`synthetic_tokenizer` are the input of `mask_cost`. `quantization` runs models by `lock_step`.
"""
