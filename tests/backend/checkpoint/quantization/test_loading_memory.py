"""The memory that quantising takes, and that reading the kept file takes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from penstock.tools.random_model import ModelDims, write_random_model

if TYPE_CHECKING:
    from pathlib import Path

MEASURE_PEAK = """
import re, sys
from pathlib import Path
import torch
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization.modes import QUANTIZATIONS, weight_bytes
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.dtypes import Dtype
from penstock.backend.passes.shared_weights.memory_trimming import return_freed_memory

def read_bytes(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

model_dir = Path(sys.argv[1])
config = read_decoder_config(model_dir)
torch.ones(1 << 20, dtype=torch.bfloat16).float()  # torch's own threads and tables
for mode in ("int8", "int8", "int4", "int4"):
    with return_freed_memory():  # so that no measurement reuses memory of the one before
        before = read_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        with return_freed_memory(), open_quantized(model_dir, config, QUANTIZATIONS[mode]) as weights:
            kept = [weights.embedding(Dtype.BF16), weights.lm_head(Dtype.BF16)]
            kept += [weights.layer(i, Dtype.BF16) for i in range(config.num_layers)]
        print(read_bytes("VmHWM") - before, weight_bytes(config, Dtype.BF16, QUANTIZATIONS[mode]))
        del kept
"""


def test_quantising_and_reading_again_need_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    write_random_model(model_dir, ModelDims(layers=8, vocab_size=16_000))
    layer_bytes = 2 * 768 * (2 * 768 + 2 * 256 + 3 * 2048)
    child = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK, str(model_dir)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    peaks = [tuple(map(int, line.split())) for line in child.stdout.splitlines()]
    assert len(peaks) == 4
    for (first_bytes, quantized_bytes), (second_bytes, _) in (peaks[:2], peaks[2:]):
        assert quantized_bytes > 40_000_000
        assert first_bytes < 1.15 * quantized_bytes + 2 * layer_bytes  # one read ahead, one being packed
        assert 0.9 * quantized_bytes < second_bytes < 1.15 * quantized_bytes
    assert [name.rsplit("-", 1)[1] for name in sorted(os.listdir(tmp_path / "cache/penstock/quantized"))] == [
        "int4.safetensors",
        "int8.safetensors",
    ]
