"""Parts that TEI's endpoints share: truncation by its fields, and the headers of its answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.frontend.text.input_encoder import Truncation

if TYPE_CHECKING:
    from penstock.frontend.endpoints.pooling.computing import Computed
    from penstock.frontend.schemas.pooling.tei import TeiBody
    from penstock.frontend.transport.asgi import Headers
    from penstock.shm.messages import ModelCard


def tei_truncation(body: TeiBody, card: ModelCard) -> Truncation:
    return Truncation(card.max_context_tokens if body.truncate else None, body.side)


def tei_headers(computed: Computed[Any], num_characters: int) -> Headers:
    """Return TEI's headers, whose times are in milliseconds, with those of every other answer."""
    times = computed.times
    total_s = time.monotonic() - computed.received_s
    tokenization_s = times.tokenized_s - computed.received_s
    spent_s = {
        b"x-total-time": total_s,
        b"x-compute-time": total_s,
        b"x-tokenization-time": tokenization_s,
        b"x-queue-time": times.queue_s,
        b"x-inference-time": max(0.0, total_s - tokenization_s - times.queue_s),
    }
    return (
        (b"x-compute-characters", b"%d" % num_characters),
        (b"x-compute-tokens", b"%d" % computed.num_tokens),
        *((name, b"%d" % round(1000 * duration_s)) for name, duration_s in spent_s.items()),
        *computed.headers(),
    )
