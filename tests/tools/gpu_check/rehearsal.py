"""Rehearse the four parts of the GPU check on the emulator, with their real command lines, processes and time limits.

`python -m tests.tools.gpu_check.rehearsal OUT [SECONDS]`; with SECONDS, part a is killed after that long and given
again. Cubins of --compile-only are used if OUT/cubins has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
IN_PROCESSES = """
import sys
if "penstock.tools.gpu_check" in sys.orig_argv:
    from dataclasses import replace
    from penstock.tools.gpu_check import runner
    runner.SECTIONS = tuple(
        replace(section, module="tests.tools.gpu_check.rehearsed_sections", run="run_" + section.name.replace("-", "_"))
        for section in runner.SECTIONS if not section.needs_peers
    )
"""


def main(argv: list[str]) -> int:
    out, kill_after_s = Path(argv[0]).absolute(), float(argv[1]) if len(argv) > 1 else None
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(IN_PROCESSES)
        environment = os.environ | {"PYTHONPATH": f"{place}:{ROOT}"}
        for part in "abcd":
            command = [sys.executable, "-m", "penstock.tools.gpu_check", "--part", part, "--out", str(out)]
            if part == "a" and kill_after_s is not None:
                killed = subprocess.Popen(command, cwd=ROOT, env=environment)
                try:
                    killed.wait(kill_after_s)
                except subprocess.TimeoutExpired:
                    killed.kill()
                    killed.wait()
                    print(f"REHEARSAL part {part}: killed after {kill_after_s:g} s", flush=True)
            started_s = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            print(f"REHEARSAL part {part}: status {status}, {time.monotonic() - started_s:.0f} s", flush=True)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
