"""Chat templates and recorded outputs of real models, which other projects' source packages have.

Nothing of theirs is part of this project. The tests run where the packages' sdists are unpacked (CONTRIBUTING.md).
"""
