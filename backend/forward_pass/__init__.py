"""The interface of a model that the engine serves. `penstock.backend.forward_pass.extensions` has its optional parts.

The engine owns sequences, pages and the schedule; a pass owns the weights, the memory of the KV cache and its layout. A
step is one call of `forward` over rows of any query length (decode is length 1), then one call of `sample`. There is no
prefill call and no decode call.

`interface` has the methods of a pass, `step` what they receive, `output` what they return; import from here. The
modules import typing and dataclasses only, so importing them costs nothing.
"""

from penstock.backend.forward_pass.interface import (
    IBatchedForwardPass,
    PassOptions,
    PassSpec,
)
from penstock.backend.forward_pass.output import (
    NOT_FINITE,
    DeviceLost,
    DeviceRows,
    ISkippableOutput,
    PendingOutput,
    StepOutput,
    TokenLogprobs,
)
from penstock.backend.forward_pass.step import (
    FROM_EMBEDDINGS,
    FROM_SLOT,
    MAX_VERIFIED,
    NO_ADAPTER,
    EmbeddedTokens,
    EmbeddingRows,
    PooledRows,
    SamplingParams,
    ScoredTokens,
    SlotInit,
    StepBatch,
    TokenMasks,
    positions_to_verify,
)

__all__ = [
    "FROM_EMBEDDINGS",
    "FROM_SLOT",
    "MAX_VERIFIED",
    "NOT_FINITE",
    "NO_ADAPTER",
    "DeviceLost",
    "DeviceRows",
    "EmbeddedTokens",
    "EmbeddingRows",
    "IBatchedForwardPass",
    "ISkippableOutput",
    "PassOptions",
    "PassSpec",
    "PendingOutput",
    "PooledRows",
    "SamplingParams",
    "ScoredTokens",
    "SlotInit",
    "StepBatch",
    "StepOutput",
    "TokenLogprobs",
    "TokenMasks",
    "positions_to_verify",
]
