"""The wait of a backend that takes the place of one that has ended."""

from __future__ import annotations

import contextlib

from penstock.backend.errors import StartupError
from penstock.backend.passes.decoder.held_weights.fingerprint import code_hash
from penstock.backend.plugins import find_forward_pass
from penstock.shm.process.standby import wait_for_turn


def import_and_wait(forward_pass: str, turn_fd: int) -> bool:
    """Import what takes long, and wait. False if this backend is not needed."""
    with contextlib.suppress(StartupError):  # `serve` reports it
        find_forward_pass(forward_pass)
    code_hash()  # of the code that is imported now: the files may be another version's when the turn comes
    return wait_for_turn(turn_fd)
