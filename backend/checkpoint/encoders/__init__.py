"""Encoders in the Hugging Face and sentence-transformers layouts: files → an EncoderConfig, heads and weights.

Imports the rest of `checkpoint`, which does not import it. Start with `read_config.read_encoder`.
"""
