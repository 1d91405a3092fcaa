"""Configurations of decoders, the names and shapes of their tensors, and the architectures that are served."""
