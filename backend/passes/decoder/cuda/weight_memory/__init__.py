"""Memory of the GPU in which packed weights lie: of the process alone, or blocks that outlive it.

`private` is torch's own, and says what such a memory is. `held` is blocks that one process fills and the next ones map,
with a `manifest` beside them. Start with `held`.
"""
