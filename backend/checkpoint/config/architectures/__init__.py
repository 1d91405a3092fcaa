"""The architectures that the built-in decoder knows.

`families` has an entry per architecture, `hf_config` the keys of config.json that entries read, `layer_patterns` the
rules for windows and rotary embeddings by layer, `expert_layers` those for mixtures of experts.
`checkpoint.config_json` puts them together.
"""
