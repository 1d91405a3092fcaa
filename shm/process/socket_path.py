"""The default path of the backend's socket. Imports nothing heavy, because clients import it."""

from __future__ import annotations

import os
from pathlib import Path


def default_socket_path() -> Path:
    """One path per user: in XDG_RUNTIME_DIR (mode 0700 by its specification), or else under /tmp."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime_dir) if runtime_dir else Path(f"/tmp/penstock-{os.getuid()}")  # noqa: S108 - the rendezvous makes it 0700 and checks it
    return base / "penstock" / "backend.sock"
