"""Quantisation methods with settings of their own kind: each reads its own into rules, as `formats.declared` does.

`settings` has what all of them and `declared` share: types of settings, and their checks.
"""
