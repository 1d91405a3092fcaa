"""What a decoder is: its configuration, its tensors with their shapes, and the architectures that are served."""
