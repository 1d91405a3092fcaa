"""Runs the small checks of all kernels once, for compute-sanitizer to watch: docs/gpu/README.md has the lines.

torch does not use the GPU here, and each tensor has its own allocation, so an access just beyond it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.tools.gpu.cases.catalogue import small_checks, small_wgmma_checks
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.devices.mirror_launcher import MirrorLauncher


def main(argv: list[str]) -> int:
    """With --leave-poison, for initcheck, NaN is not written to the device: comparisons are meaningless then."""
    leaves_poison = "--leave-poison" in argv
    launcher = MirrorLauncher(pooled=False, leaves_poison=leaves_poison)
    checks = [*small_checks(launcher.shared_bytes_per_sm), *(small_wgmma_checks() if launcher.has_wgmma else ())]
    status = run_checks(launcher, checks)
    return 0 if leaves_poison else status


def run_checks(launcher: Launcher, checks: Iterable[Check]) -> int:
    """Return the exit status: 1 if a check failed."""
    failed = []
    for check in checks:
        try:
            check.run(launcher)
        except Exception as error:  # noqa: BLE001 - shown; the tool must see the other checks too
            failed.append(f"{check.family}.{check.name}: {str(error)[:200]}")
    print(f"failed: {'; '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
