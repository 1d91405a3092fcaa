"""Cases of attention: decode, prefill and encoders, and the settings between which gpu-check chooses."""
