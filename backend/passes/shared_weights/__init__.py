"""Packed weights that outlive the process which packed them, on the CPU and on a GPU.

`sharing` finds and leaves them, by a fingerprint of what they were made from (`fingerprint`): in a mailbox of the
supervisor, or in a file (`packed_file`). `sealed_manifest` is the description that travels with them; `blocks` has what
all kinds of memory have in common, and `watch` compares it with its checksums. The memory itself is `cpu.weight_memory`
and `cuda.memory`. Start with `sharing`.
"""
