"""Load generators: a few requests each, all of them answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import BIN
from demo_models import GENERATION

NUM_REQUESTS, NUM_OUTPUT_TOKENS = 4, 8
TOKENIZER = Path(__file__).parents[3] / "backend" / "demo_model"
"""Both tools count and make up their prompts' tokens themselves."""


def run(argv: list[Any], directory: Path) -> None:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "160"}
    ended = subprocess.run(
        [*map(str, argv)], cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=400
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def test_aiperf_measures_streams_of_completions(server_url: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("aiperf")
    load = ["--request-count", NUM_REQUESTS, "--concurrency", 2, "--synthetic-input-tokens-mean", 20]
    load += ["--output-tokens-mean", NUM_OUTPUT_TOKENS, "--endpoint-type", "completions", "--streaming"]
    server = ["--model", GENERATION, "--url", server_url, "--tokenizer", TOKENIZER]
    run([program, "profile", *server, *load, "--ui", "none", "--output-artifact-dir", tmp_path / "out"], tmp_path)
    measured = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == NUM_REQUESTS
    assert measured["request_error_rate"]["avg"] == 0
    assert measured["total_usage_prompt_tokens"]["avg"] > 0


def test_guidellm_measures_streams_of_chats(server_url: str, tmp_path: Path) -> None:
    # It needs torch for a data loader alone: the project's will do.
    packages = next((BIN.parent / "lib").glob("python3*/site-packages"))
    code = f"import site; site.addsitedir({str(packages)!r}); from guidellm.__main__ import cli; cli()"
    options = {
        "backend": f"kind=openai_http,target={server_url},model={GENERATION}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={TOKENIZER}",
        "data": f"kind=synthetic_text,prompt_tokens=20,output_tokens={NUM_OUTPUT_TOKENS}",
        "output": f"kind=json,path={tmp_path / 'measured.json'}",
    }
    argv = [part for name, value in options.items() for part in (f"--{name}", value)]
    run([sys.executable, "-c", code, "run", *argv, "--disable-console-interactive"], tmp_path)
    (benchmark,) = json.loads((tmp_path / "measured.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
