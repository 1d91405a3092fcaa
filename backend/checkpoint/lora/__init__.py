"""Low-rank adapters (LoRA, arXiv 2106.09685) in the layout of the peft library: adapter_config.json and
adapter_model.safetensors. Start with `peft_adapter`.

May import `penstock.backend.checkpoint` and `penstock.backend.errors`.
"""
