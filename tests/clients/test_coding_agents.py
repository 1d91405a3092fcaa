"""Codex CLI and Claude Code without a terminal: each runs the command that the model calls for, and tells its answer.

The model knows its answers (scripted_pass.py), so all that lies between it and the agent is tested: a prompt of ten
thousand tokens and more, its tools, the stream of the call, and the call's output in the next request.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from demo_models import ANSWER, OUTPUT
from test_javascript import NODE_CLIENTS
from works_with_page import ADDRESS, examples

PACKAGES = NODE_CLIENTS / "node_modules"
TASK = "Run the command."


def program(pattern: str) -> Path:
    """The program in an agent's package for this platform; npm runs no scripts that would link it."""
    found = sorted(PACKAGES.glob(pattern))
    if not found:
        pytest.skip(f"npm has not installed {pattern}: no npm, or no such package for this platform")
    return found[0]


def run(argv: list[str], home: Path, **env: str) -> str:
    """Return the agent's output. It starts in an empty directory, which is its home."""
    others = ("ANTHROPIC_", "CLAUDE", "OPENAI_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    ended = subprocess.run(
        argv,
        cwd=home,
        env=inherited | {"HOME": str(home)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_codex_runs_the_command_and_tells_the_answer(scripted_url: str, tmp_path: Path) -> None:
    config = tmp_path / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(examples("toml")["Codex CLI"].replace(ADDRESS, scripted_url))
    options = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
    printed = run(["node", str(program("@openai/codex/bin/codex.js")), "exec", *options, TASK], tmp_path)
    events = [json.loads(line) for line in printed.splitlines()]
    items = {event["item"]["type"]: event["item"] for event in events if event["type"] == "item.completed"}
    assert items["command_execution"]["aggregated_output"].strip() == OUTPUT
    assert items["agent_message"]["text"] == ANSWER
    assert events[-1]["type"] == "turn.completed"


def test_claude_code_runs_the_command_and_tells_the_answer(scripted_url: str, tmp_path: Path) -> None:
    argv = [str(program("@anthropic-ai/claude-code-linux-*/claude")), "-p", TASK, "--allowedTools", "Bash"]
    env = {"ANTHROPIC_BASE_URL": scripted_url, "ANTHROPIC_AUTH_TOKEN": "none"}
    printed = run([*argv, "--output-format", "json"], tmp_path, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", **env)
    result = json.loads(printed)
    assert (result["subtype"], result["is_error"], result["result"]) == ("success", False, ANSWER)
    assert result["num_turns"] == 2
