"""Memory of the GPU for packed weights: the process's own, or blocks that outlive it.

`private` is torch's own memory, and has the interface. `shared` is blocks that one process fills and later ones map,
with a `manifest` beside them. Start with `shared`.
"""
