"""Measurements of one part of Penstock by itself: no server, no HTTP, mostly no model.

Each subcommand of `penstock bench` has a module of its name here, which reads: options, measurement, table, aims.
`scheduling` and `channel_sweep` drive the backend's real loop, the first with stand-ins for link and device
(`unsent_link`), the second with simulated ones (`simulation`, `simulated_device`). `grammar_cases` and
`made_up_tokenizer` are the input of `mask_cost`.
"""
