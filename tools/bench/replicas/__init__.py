"""Measurements of a server with several backends of the same model: one is killed under load.

It may import `harness`, `load_generator` and `options`.
"""
