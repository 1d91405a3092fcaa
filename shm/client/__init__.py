"""The client of the backend, for the frontend and for any other asyncio server: `BackendClient`.

Everything a user of the client needs is exported here; docs/client.md explains it with complete programs.
The package may import the rest of `shm`, and nothing else of Penstock. Start with `client`.
"""

from typing import TypeAlias

from penstock.process.private_directory import default_socket_path
from penstock.shm.buffers.cuda_driver import open_device
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.buffers.shared_buffers import BufferGone, BuffersExhausted, BufferSlice, DeviceArray, SharedBuffer
from penstock.shm.client.capacity import BackendUnavailable, Overloaded
from penstock.shm.client.client import BackendClient
from penstock.shm.client.pooled_matrix import pool_into
from penstock.shm.client.replicas.replica_set import ReplicaSet, backends_of, clients_of
from penstock.shm.client.replicas.socket_directory import SocketDirectory
from penstock.shm.client.request import GenerationRequest, Question
from penstock.shm.client.streams.pooled import PooledFailed, PooledRequest, PooledResult, PooledStream
from penstock.shm.client.streams.token_stream import AnswerStream, LogprobEntry, TokenBatch, TokenStream
from penstock.shm.messages import (
    AdapterChange,
    BufferContent,
    BufferKind,
    BufferRequest,
    Constraints,
    ContentSpec,
    FailureCode,
    Finish,
    Grammar,
    Keep,
    Linger,
    ModelCard,
    Progress,
    Quote,
    QuoteTerms,
    RequestName,
    Sampling,
    StreamName,
    StreamQuestion,
)

ServingClient: TypeAlias = BackendClient | ReplicaSet
"""A client of one backend or of several, which serve requests in the same way."""

__all__ = [
    "AdapterChange",
    "AnswerStream",
    "BackendClient",
    "BackendUnavailable",
    "BufferContent",
    "BufferGone",
    "BufferKind",
    "BufferRequest",
    "BufferSlice",
    "BuffersExhausted",
    "Constraints",
    "ContentSpec",
    "DeviceArray",
    "DeviceError",
    "FailureCode",
    "Finish",
    "GenerationRequest",
    "Grammar",
    "Keep",
    "Linger",
    "LogprobEntry",
    "ModelCard",
    "Overloaded",
    "PooledFailed",
    "PooledRequest",
    "PooledResult",
    "PooledStream",
    "Progress",
    "Question",
    "Quote",
    "QuoteTerms",
    "ReplicaSet",
    "RequestName",
    "Sampling",
    "ServingClient",
    "SharedBuffer",
    "SocketDirectory",
    "StreamName",
    "StreamQuestion",
    "TokenBatch",
    "TokenStream",
    "backends_of",
    "clients_of",
    "default_socket_path",
    "open_device",
    "pool_into",
]
