"""The process that compute-sanitizer watches: every kernel on small shapes, each tensor in its own allocation.

torch computes the references on the CPU and does not use the GPU here.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from penstock.tools.gpu_check.cases.catalogue import small_checks, small_wgmma_checks
from penstock.tools.gpu_check.devices.mirror_launcher import MirrorLauncher
from penstock.tools.gpu_check.reporting.results import DEADLINE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
    from penstock.tools.gpu_check.cases.check import Check


def main(argv: list[str]) -> int:
    leaves_poison = "--leave-poison" in argv
    launcher = MirrorLauncher(pooled=False, leaves_poison=leaves_poison)
    until_s = float(os.environ.get(DEADLINE_VARIABLE, "inf"))
    checks = [*small_checks(launcher.shared_bytes_per_sm), *(small_wgmma_checks() if launcher.has_wgmma else ())]
    status = run_small_checks(launcher, checks, until_s)
    return 0 if leaves_poison else status  # with --leave-poison the comparisons are meaningless


def run_small_checks(launcher: Launcher, checks: Iterable[Check], until_s: float) -> int:
    """Run checks until until_s of the monotonic clock. Returns the exit status: 1 if a check failed."""
    checks = list(checks)
    failed, num_run = [], 0
    for check in checks:
        if time.monotonic() > until_s:
            break
        num_run += 1
        try:
            check.run(launcher)
        except Exception as error:  # noqa: BLE001 - recorded; the tool must see the other checks too
            failed.append(f"{check.family}.{check.name}: {str(error)[:200]}")
    print(f"checked {num_run} of {len(checks)}; failed: {'; '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
