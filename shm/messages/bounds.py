"""The limits of the messages, and the integer types that carry them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_CONTEXT_TOKENS = 1 << 24
MAX_INLINE_PROMPT_TOKENS = 4096
"""Prompts up to this length travel in the message; longer ones in the frontend's arena."""
MAX_STEP_EVENTS = 1 << 16
MAX_LOGPROBS = 20
"""Top log probabilities per token."""
MAX_LOGPROB_TOKEN_IDS = 128
"""Tokens that a request may name to get their log probabilities; vLLM's limit."""
MAX_GRAMMAR_CHARACTERS = 32 << 10
MAX_RECORD_BYTES = 1 << 20
"""Bytes of a stream's record, which a frontend keeps in the backend to write the stream again."""
MAX_BREAKER_BYTES = 128 << 10
"""Token ids of a request's DRY breakers."""
MAX_PICTURES = 64
"""Pictures of one prompt."""
MAX_PICTURE_SPANS = 128
"""Runs of tokens between which a picture's embeddings are divided."""
MAX_TO_BACKEND_BYTES = (192 << 10) + MAX_BREAKER_BYTES + MAX_RECORD_BYTES + 12 * MAX_PICTURES * MAX_PICTURE_SPANS
"""Largest message to the backend: a Generate with an inline prompt, full constraints, a grammar of four-byte
characters, breakers, pictures and the record of a stream; or MAX_POOL_BATCH inputs with inline prompts."""
MAX_POOL_BATCH = 64
"""Inputs of one message."""
MAX_TO_FRONTEND_BYTES = (4 << 20) + MAX_RECORD_BYTES
MAX_VECTOR_PART_BYTES = 512 << 10
"""Values of one part of a pooled result."""
MAX_SHARED_BUFFERS = 64
"""Shared buffers of one client."""
MAX_SHARED_BUFFER_BYTES = 1 << 30
"""Bytes of one shared buffer."""

MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Bounds of a tenant's weight. JSON and MessagePack know infinity and NaN; neither is within these."""

U63 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
I31 = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
