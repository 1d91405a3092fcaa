"""The handshake over the rendezvous socket, before the link carries requests."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import I31, MAX_CONTEXT_TOKENS, U63, TokenId
from penstock.shm.messages.buffers import BufferGrant, BufferRequest
from penstock.shm.messages.requests import AdapterId, PooledKind, Sampling

PROTOCOL_VERSION = 20
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
Trait = Annotated[str, Meta(max_length=512)]
MAX_ADAPTERS = 256
MAX_CARD_BYTES = 120_000
"""The longest encoded `ModelCard`. A welcome is one packet, and Linux by default refuses packets above about 200 kB."""
MAX_WELCOME_BYTES = MAX_CARD_BYTES + 4096


class Hello(Struct, frozen=True, array_like=True, tag=10, forbid_unknown_fields=True):
    """Frontend → backend: the first message."""

    protocol_version: Annotated[int, Meta(ge=0, le=1 << 16)]
    buffers: BufferRequest | None = None


class PooledWidth(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A kind of vector that a model computes, and its number of values."""

    kind: PooledKind
    num_values: Annotated[int, Meta(ge=1, le=1 << 24)]


class Adapter(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A low-rank adapter of the model (LoRA), which requests use by its own name."""

    name: ModelName
    adapter_id: AdapterId
    rank: Annotated[int, Meta(ge=1, le=1 << 16)]
    created: U63 = 0
    """Seconds since 1970."""


class ModelCard(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Facts about the model that a frontend needs. model_dir contains the tokenizer and the chat template."""

    model_id: ModelName
    model_dir: Annotated[str, Meta(max_length=4096)]
    created: U63
    """Seconds since 1970."""
    vocab_size: Annotated[int, Meta(ge=1, le=1 << 24)]
    max_context_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
    """Prompt and generated tokens of one sequence; at most what the KV budget holds."""
    max_waiting: I31
    """Requests that may wait before new ones are answered 429."""
    eos_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()
    """The end tokens that the model's files name. A frontend adds those that the chat template shows."""
    default_sampling: Sampling = Sampling()
    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    quantization: Annotated[str, Meta(max_length=64)] = "none"
    """The form that the weights were converted to, such as "int8", or how the checkpoint stores them, such
    as "gptq"."""
    generates: bool = True
    """The model generates text."""
    pooled: Annotated[tuple[PooledWidth, ...], Meta(max_length=8)] = ()
    """The kinds of vectors that it computes; with "embed" first, it is an embedding model."""
    normalizes: bool = False
    """The model's own configuration ends with a normalisation of its vectors."""
    aliases: Annotated[tuple[ModelName, ...], Meta(max_length=64)] = ()
    """Further names that requests may use; "*" is any name."""
    traits: Annotated[tuple[tuple[Trait, Trait], ...], Meta(max_length=16)] = ()
    """Names and values of the settings that the fingerprint covers, to explain how two models differ."""
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    """Adapters are not covered by the fingerprint: a request names the weights of its adapter itself."""
    max_picture_bytes: Annotated[int, Meta(ge=0, le=4 * MAX_CONTEXT_TOKENS)] = 0
    """The most pixels of one picture; 0 if the model takes none."""

    @property
    def identity(self) -> tuple[str, str, int]:
        """The properties that a backend must share with another to continue its streams."""
        return self.model_id, self.fingerprint, self.vocab_size

    @property
    def takes_pictures(self) -> bool:
        return self.max_picture_bytes > 0

    def adapter_named(self, name: str) -> Adapter | None:
        return next((adapter for adapter in self.adapters if adapter.name == name), None)

    def pooled_width(self, kind: PooledKind) -> int | None:
        return next((pooled.num_values for pooled in self.pooled if pooled.kind == kind), None)


class Welcome(Struct, frozen=True, array_like=True, tag=11, forbid_unknown_fields=True):
    """Backend → frontend: your identity, and with it the fds of what you share.

    In this order: the message socket to connect to (O_PATH), the frontend's arena (read and write), the backend's board
    (read only), the frontend's own board (read and write), and a granted buffer region on the host.
    """

    epoch: U63
    identity: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """A secret of this frontend and the backend. Messages with it are the frontend's, and its outputs go there."""
    backend_pid: I31
    arena_slots: Annotated[int, Meta(ge=1, le=1 << 16)]
    arena_slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)]
    credit: Annotated[int, Meta(ge=1, le=1 << 16)]
    model: ModelCard
    buffers: BufferGrant | None = None


class Refusal(Struct, frozen=True, array_like=True, tag=12, forbid_unknown_fields=True):
    """Backend → frontend instead of a Welcome."""

    reason: Annotated[str, Meta(max_length=512)]


class BuffersClosed(Struct, frozen=True, array_like=True, tag=13, forbid_unknown_fields=True):
    """Frontend → backend: the last message before it disconnects, if its process goes on.

    It has closed all of the backend's device memory.
    """
