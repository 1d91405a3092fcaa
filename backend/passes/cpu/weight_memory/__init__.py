"""Memory for packed weights: the process's own, or memory that outlives it.

`anonymous` is the process's own. `shared` is a memfd or a file that one process fills and later ones map, with a
`manifest` at its end; `penstock.backend.passes.shared_weights` finds and leaves it. Start with `shared`.
"""
