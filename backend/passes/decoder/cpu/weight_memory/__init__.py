"""Memory in which packed weights lie: of the process alone, or shared memory that outlives it.

`anonymous` is the process's own. `held` is a memfd that one process fills and the next ones map, with a `manifest` at
its end; `holding` finds and leaves it, by a fingerprint of what it was made from (`fingerprint`). `watch` compares it
with its checksums. Start with `holding`.
"""
