"""Memory in which packed weights lie: of the process alone, or shared memory that outlives it.

`anonymous` is the process's own. `held` is a memfd that one process fills and the next ones map, with a `manifest` at
its end; `held_weights`, beside this package's parent, finds and leaves it. Start with `held`.
"""
