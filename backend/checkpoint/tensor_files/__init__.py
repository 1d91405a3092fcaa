"""The tensor files of a checkpoint as a whole: opens all of them, fits them to the model, and finds what has no place.

`formats` reads a tensor out of its file; `checkpoint.layout` has the names of the files. Start at `opening`.
"""
