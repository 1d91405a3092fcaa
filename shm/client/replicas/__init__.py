"""Several backends with the same model, used as one: `ReplicaSet`.

`replica_set` has the interface of `BackendClient` and moves streams; `replica_chooser` chooses the replica of a
request. `socket_directory` says which backends there are, if a directory has their sockets. The package may import
`shm.client` and what that may.
"""
