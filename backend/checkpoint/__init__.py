"""Reads a model from disk or from the Hugging Face hub: configuration, tokenizer size, generation defaults, weights.

`hub` turns --model into a directory. `config_json` reads config.json into a `DecoderConfig`; `weights` reads the
tensors that `tensors` lists, one layer at a time. Everything in a checkpoint is untrusted: `json_file` checks types and
bounds, and every error is a StartupError in one line. May import `errors` and `penstock.shm`; not the passes.
"""
