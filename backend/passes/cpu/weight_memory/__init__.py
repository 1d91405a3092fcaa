"""Packed weights, in the process's own memory or in memory that outlives it.

`native_weights` packs them. `anonymous` is the process's own. `shared` is a memfd or a file that one process fills and
later ones map, with a `manifest` at its end; `penstock.backend.passes.shared_weights` finds and leaves it. Start with
`shared`.
"""
