"""Several backends with the same model, used as one: `ReplicaSet`.

`replica_set` has the interface of `BackendClient` and moves streams, `routing` chooses the replica of a request. The
package may import `shm.client` and what that may.
"""
