"""Finds the syntax of a model's reasoning and tool calls: from what its chat template writes (`rendered`), or by name
(`named_formats`). Start with `model_syntax`."""
