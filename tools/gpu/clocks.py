"""The GPU's clocks, power and temperature, once a second, as nvidia-smi tells them while a run lasts."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType

_FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


@dataclass(frozen=True, slots=True)
class Sample:
    """at_s is of the monotonic clock. A value that the driver does not tell is -1."""

    at_s: float
    sm_mhz: float
    memory_mhz: float
    watts: float
    celsius: float


class ClockLog:
    """Samples while its context lasts; none where nvidia-smi is missing."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._child: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> ClockLog:
        path = shutil.which("nvidia-smi")
        if path is not None:
            argv = [path, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", "--id=0", "--loop=1"]
            self._child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._child is not None:
            self._child.kill()
            with self._child:
                self._reader.join()

    def _read(self) -> None:
        for line in (self._child and self._child.stdout) or ():
            values = [_number(value) for value in line.split(",")]
            if len(values) == _FIELDS.count(",") + 1:
                self.samples.append(Sample(time.monotonic(), *values))


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:  # "[N/A]"
        return -1.0


def in_words(samples: list[Sample], begun_s: float, ended_s: float) -> str:
    """The clock and the power between two times; "" if there is no sample."""
    found = [sample for sample in samples if begun_s <= sample.at_s <= ended_s]
    if not found:
        return ""
    clocks, watts = [sample.sm_mhz for sample in found], statistics.fmean(sample.watts for sample in found)
    return f"{min(clocks):.0f} to {max(clocks):.0f} MHz, {watts:.0f} W, {max(each.celsius for each in found):.0f} °C"
