"""Where the backend's socket is when no option says otherwise. Imports nothing heavy: clients use it too."""

from __future__ import annotations

import os
from pathlib import Path


def default_socket_path() -> Path:
    """One per user: in XDG_RUNTIME_DIR where there is one (0700 by its specification), else under /tmp."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime_dir) if runtime_dir else Path(f"/tmp/penstock-{os.getuid()}")  # noqa: S108 - made 0700 and checked by the rendezvous
    return base / "penstock" / "backend.sock"
