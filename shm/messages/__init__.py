"""Every message between a frontend and the backend, declared once.

Messages are frozen, array-like, tagged msgspec Structs; there is no other codec. Every bound is in a type, so what
decodes is within its limits. Token ids travel as packed little-endian int32, request ids as packed little-endian
uint64. This package imports nothing else of Penstock; import from here, not from its modules. Start with `submit`
and `outputs`; a connection begins with the messages of `handshake`.
"""

from penstock.shm.messages.bounds import (
    MAX_CONTEXT_TOKENS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_INLINE_PROMPT_TOKENS,
    MAX_LOGPROBS,
    MAX_SHARED_BUFFER_BYTES,
    MAX_SHARED_BUFFERS,
    MAX_STEP_EVENTS,
    MAX_TO_BACKEND_BYTES,
    MAX_TO_FRONTEND_BYTES,
    MAX_WEIGHT,
    MIN_WEIGHT,
    TokenId,
)
from penstock.shm.messages.buffers import (
    BufferContent,
    BufferGrant,
    BufferKind,
    BufferRef,
    BufferRequest,
    BufferReturn,
    ContentSpec,
)
from penstock.shm.messages.codec import (
    WireError,
    decode_hello,
    decode_to_backend,
    decode_to_frontend,
    decode_welcome,
    encode,
)
from penstock.shm.messages.handshake import PROTOCOL_VERSION, BuffersClosed, Hello, ModelCard, Refusal, Welcome
from penstock.shm.messages.outputs import (
    NO_TOKEN,
    EventLogprobs,
    Failure,
    FailureCode,
    Finish,
    PromptLogprobs,
    Started,
    StepOutputs,
)
from penstock.shm.messages.submit import ArenaRef, Cancel, Constraints, Credit, Grammar, Sampling, Submit

__all__ = [
    "MAX_CONTEXT_TOKENS",
    "MAX_GRAMMAR_CHARACTERS",
    "MAX_INLINE_PROMPT_TOKENS",
    "MAX_LOGPROBS",
    "MAX_SHARED_BUFFERS",
    "MAX_SHARED_BUFFER_BYTES",
    "MAX_STEP_EVENTS",
    "MAX_TO_BACKEND_BYTES",
    "MAX_TO_FRONTEND_BYTES",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "NO_TOKEN",
    "PROTOCOL_VERSION",
    "ArenaRef",
    "BufferContent",
    "BufferGrant",
    "BufferKind",
    "BufferRef",
    "BufferRequest",
    "BufferReturn",
    "BuffersClosed",
    "Cancel",
    "Constraints",
    "ContentSpec",
    "Credit",
    "EventLogprobs",
    "Failure",
    "FailureCode",
    "Finish",
    "Grammar",
    "Hello",
    "ModelCard",
    "PromptLogprobs",
    "Refusal",
    "Sampling",
    "Started",
    "StepOutputs",
    "Submit",
    "TokenId",
    "Welcome",
    "WireError",
    "decode_hello",
    "decode_to_backend",
    "decode_to_frontend",
    "decode_welcome",
    "encode",
]
