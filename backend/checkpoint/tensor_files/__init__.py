"""The tensor files of a checkpoint as a whole: opens all of them, fits them to the model, and finds what has no place.

`formats` reads a tensor out of its file. Start at `opening`. `lora_adapter` reads a low-rank adapter (LoRA, arXiv
2106.09685) in the layout of the peft library: adapter_config.json (`lora_config`) and adapter_model.safetensors.
"""
