"""Rehearse the four parts of the GPU check on the emulator, with their real command lines, processes and time limits.

`python -m tests.tools.gpu_check.rehearsal OUT [SECONDS [PARTS]]`; with SECONDS above 0, the first of PARTS ("abcd") is
killed after that long and given again. Between two parts OUT travels to another directory, as from one lent machine to
the next. Cubins of --compile-only are used if OUT/cubins has them.
"""

from __future__ import annotations

import os
import shutil
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
    out, kill_after_s = Path(argv[0]).absolute(), float(argv[1]) if len(argv) > 1 else 0.0
    parts = argv[2] if len(argv) > 2 else "abcd"
    with tempfile.TemporaryDirectory() as place:
        Path(place, "sitecustomize.py").write_text(IN_PROCESSES)
        environment = os.environ | {"PYTHONPATH": f"{place}:{ROOT}"}
        for part in parts:
            there = Path(place, f"machine-{part}", "gpu-check")
            there.parent.mkdir()
            if out.exists():
                shutil.move(out, there)
            command = [sys.executable, "-m", "penstock.tools.gpu_check", "--part", part, "--out", str(there)]
            if part == parts[0] and kill_after_s > 0:
                killed = subprocess.Popen(command, cwd=ROOT, env=environment)
                try:
                    killed.wait(kill_after_s)
                except subprocess.TimeoutExpired:
                    killed.kill()
                    killed.wait()
                    print(f"REHEARSAL part {part}: killed after {kill_after_s:g} s", flush=True)
            started_s = time.monotonic()
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            shutil.move(there, out)
            print(f"REHEARSAL part {part}: status {status}, {time.monotonic() - started_s:.0f} s", flush=True)
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
