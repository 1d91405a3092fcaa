"""Bounds of a recorded backend's sizes: a replay allocates this much."""

from __future__ import annotations

from penstock.shm.messages import MAX_CONTEXT_TOKENS
from penstock.shm.recording.events import BackendStarted
from penstock.shm.recording.file import RecordingError
from penstock.tools.engine_rig import RigSizes

_MAX_TABLE_ENTRIES = 1 << 26
_MAX_GROUPS = 64
_BOUNDS = {
    "max_running": (1, 4096),
    "max_batch_tokens": (1, 1 << 24),
    "num_pages": (0, 1 << 24),
    "max_context": (1, MAX_CONTEXT_TOKENS),
    "vocab_size": (64, 1 << 24),
    "max_waiting": (1, 1 << 24),
    "num_plans_ahead": (0, 64),
    "num_checkpoints": (0, 1 << 24),
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
    windows = started.kv_windows
    if not 1 <= len(windows) <= _MAX_GROUPS or any(window is not None and window < 1 for window in windows):
        raise RecordingError(
            f"the recording says windows {windows}; they are from 1 to {_MAX_GROUPS}, of 1 token or more"
        )
    if not started.num_pages:
        return
    groups = rig_sizes(started).groups
    if groups.longest_sequence(started.num_pages, started.max_context) < started.max_context:
        raise RecordingError(
            f"the recording says {started.num_pages} pages of {started.page_size} tokens, which cannot hold its "
            f"context of {started.max_context} tokens"
        )
    if (entries := started.max_running * groups.pages_for(started.max_context)) > _MAX_TABLE_ENTRIES:
        raise RecordingError(f"the recording needs a page table of {entries} entries; at most {_MAX_TABLE_ENTRIES}")


def rig_sizes(started: BackendStarted) -> RigSizes:
    return RigSizes(
        num_pages=started.num_pages,
        page_size_tokens=started.page_size,
        max_running=started.max_running,
        max_batch_tokens=started.max_batch_tokens,
        num_plans_ahead=started.num_plans_ahead,
        num_checkpoints=started.num_checkpoints if started.keeps_state else None,
        kv_windows=started.kv_windows,
    )
