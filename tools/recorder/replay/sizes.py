"""The bounds of what a recording says about its backend: a replay allocates that much."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shm.messages import MAX_CONTEXT_TOKENS
from penstock.shm.recording.file import RecordingError

if TYPE_CHECKING:
    from penstock.shm.recording.events import BackendStarted

_MAX_TABLE_ENTRIES = 1 << 26
_BOUNDS = {
    "max_running": (1, 4096),
    "max_batch_tokens": (1, 1 << 24),
    "num_pages": (0, 1 << 24),
    "max_context": (1, MAX_CONTEXT_TOKENS),
    "vocab_size": (64, 1 << 24),
    "max_waiting": (1, 1 << 24),
    "num_plans_ahead": (0, 64),
}


def check_sizes(started: BackendStarted) -> None:
    """Raises RecordingError for a value that no backend has, or whose memory a replay would not find."""
    bounds = _BOUNDS | ({"page_size": (1, 4096)} if started.num_pages else {})
    for name, (least, most) in bounds.items():
        value = getattr(started, name)
        if not least <= value <= most:
            raise RecordingError(f"the recording says {name} {value}; it is from {least} to {most}")
    if not 0.0 <= started.priority_step_s < 1e9:
        raise RecordingError(f"the recording says priority_step_s {started.priority_step_s}; it is at least 0")
    if started.window_tokens is not None and started.window_tokens < 1:
        raise RecordingError(f"the recording says window_tokens {started.window_tokens}; it is at least 1")
    if not started.num_pages:
        return
    if started.window_tokens is None and started.num_pages * started.page_size < started.max_context:
        raise RecordingError(
            f"the recording says {started.num_pages} pages of {started.page_size} tokens, which cannot hold its "
            f"context of {started.max_context} tokens"
        )
    if (entries := started.max_running * pages_per_sequence(started)) > _MAX_TABLE_ENTRIES:
        raise RecordingError(f"the recording needs a page table of {entries} entries; at most {_MAX_TABLE_ENTRIES}")


def pages_per_sequence(started: BackendStarted) -> int:
    """Entries of a slot in the page table."""
    return -(-started.max_context // started.page_size)
