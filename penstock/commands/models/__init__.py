"""Models by name: download, list and remove them, see which servers run, and ask one a question.

It imports the backend's sources of models, never a model's weights. Start with `command`.
"""
