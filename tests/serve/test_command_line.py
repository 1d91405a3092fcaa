"""The command line of `penstock`: options of other servers, the version, and the model without an option."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from rich.console import Console

import penstock.main
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.model_names import DEMO_MODEL, DEMO_MODEL_DIR
from penstock.main import app
from penstock.serve import command as serve_module
from penstock.serve.foreign_options import ANSWER_OF, FOREIGN_COMMANDS
from penstock.serve.options import ServeOptions, backend_options

OURS = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(ServeOptions)}


def one_line(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 1) -> str:
    """Run a command that ends with one line on standard error; return the line."""
    line = refusal(capsys, *argv, status=status)
    assert "\n" not in line
    return line


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, status: int) -> str:
    with pytest.raises(SystemExit) as ended:
        app(argv)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out) == (status, "")
    return shown.err.strip()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--max-model-len", "4096"], "use --max-context"),
        (["--ctx-size=4096"], "use --max-context"),
        (["--gpu-memory-utilization", "0.9"], "use --kv-budget"),
        (["--tensor-parallel-size", "2"], "a model is on one GPU as a whole; --gpu 0,1 runs a replica on each"),
        (["--cpu-offload-gb", "4"], "weights cannot stay on the host"),
        (["-hf", "org/repo:Q4_K_M"], "Here: use --model. Try: penstock serve --model org/repo:Q4_K_M"),
        (["--is-embedding", "some/model"], "Try: penstock serve --task embed some/model"),
        (["--data-parallel-size", "2"], "use --replicas, or --gpu"),
        (["--enable-auto-tool-choice"], "this is always so"),
        (["-ngl", "99"], "use --gpu auto or --gpu none"),
        (["--kv_cache_dtype", "fp8"], "use --kv-dtype"),
        (["--max-contxt", "5"], "Did you mean --max-context?"),
    ],
)
def test_option_of_another_server_is_answered_by_its_meaning(
    given: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = one_line(capsys, "serve", *given, status=2)
    assert given[0].partition("=")[0] in line
    assert expected in line


def test_all_unknown_options_are_answered_at_once_with_the_command_in_our_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "serve some/model --max-model-len 4096 --gpu-memory-utilization 0.9 --enable-prefix-caching --jinja"
    text = refusal(capsys, *given.split(), "--seed", "-1", "--port", "9", "--max-runing=3", "--zzz", status=2)
    assert text.splitlines() == [
        "penstock: 7 options are unknown here:",
        "  --max-model-len: use --max-context",
        "  --gpu-memory-utilization: use --kv-budget with a size such as 6GB, or with auto",
        "  --enable-prefix-caching: this is always so and needs no option",
        "  --jinja: this is always so and needs no option; --tool-parser none turns tools off",
        "  --seed: send seed with the request",
        "  --max-runing: unknown; did you mean --max-running?",
        "  --zzz: unknown",
        "Try: penstock serve some/model --max-context 4096 --kv-budget auto --port 9",
    ]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("stop", "Here: end the server with Ctrl-C or SIGTERM"),
        ("ollama run m", "Here: leave the word ollama out"),
        ("run-batch -i f", "Here: there are no batch files"),
        ("collect-env", "Here: use penstock doctor."),
        ("bench serve --model m", "here use penstock bench load"),
        ("pul", 'Did you mean "pull"?'),
    ],
)
def test_command_of_another_server_is_answered_by_its_meaning(
    argv: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in one_line(capsys, *argv.split(), status=2)


def test_foreign_commands_are_not_ours() -> None:
    ours = {name for name in app if not name.startswith("-")}
    assert FOREIGN_COMMANDS.keys().isdisjoint(ours)
    named = {name for answer in FOREIGN_COMMANDS.values() for name in re.findall(r"penstock ([a-z]+)", answer)}
    assert named <= ours


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options with which `penstock serve` would run."""
    served: list[ServeOptions] = []

    def keep(options: ServeOptions) -> int:
        served.append(options)
        return 0

    monkeypatch.setattr(serve_module, "serve", keep)
    return served


def run_serve(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["serve", *words])
    assert ended.value.code == 0


def test_command_line_comes_before_environment_before_file(
    served: list[ServeOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('model = "of/file"\nmax-context = 100\nmax_running = 4\nworkers = 2\napi-key = ["a", "b"]\n')
    monkeypatch.setenv("PENSTOCK_MAX_RUNNING", "5")
    monkeypatch.setenv("PENSTOCK_WORKERS", "3")
    run_serve("--config", str(path), "--workers", "4")
    run_serve("other/model", "--config", str(path))
    assert [options.model for options in served] == ["of/file", "other/model"]
    assert (served[0].workers, served[0].max_running, served[0].max_context) == (4, 5, 100)
    assert served[0].api_key == ("a", "b")
    path.write_text("max-contxt = 100")
    line = one_line(capsys, "serve", "--config", str(path), status=2)
    assert line == f'penstock: Unknown option: "[max-contxt]" from {path}. Did you mean --max-context?'
    for content in (b"max-context = ", b"\xff"):
        path.write_bytes(content)
        line = one_line(capsys, "serve", "--config", str(path), status=2)
        assert line.startswith(f"penstock: --config {path} is not TOML: ")
    for unreadable, reason in (("/nowhere.toml", "No such file or directory"), (str(tmp_path), "Is a directory")):
        line = one_line(capsys, "serve", "--config", unreadable, status=2)
        assert line == f"penstock: --config {unreadable} cannot be read: {reason}"


def test_variable_that_no_option_reads_is_named(
    served: list[ServeOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_PROT", "1")
    monkeypatch.setenv("PENSTOCK_URL", "http://127.0.0.1:1")  # an option of penstock chat
    monkeypatch.setenv("PENSTOCK_ONCE", "1")  # of penstock top, which reads only connections from the environment
    run_serve("some/model")
    assert capsys.readouterr().err == (
        "penstock serve: PENSTOCK_ONCE in the environment is no option; did you mean PENSTOCK_SOCKET?\n"
        "penstock serve: PENSTOCK_PROT in the environment is no option; did you mean PENSTOCK_PORT?\n"
    )
    assert len(served) == 1
    for name, run_alone in (("backend", penstock.main.backend), ("frontend", penstock.main.frontend)):
        with monkeypatch.context() as patched:
            patched.setattr(penstock.main, "import_module", lambda _name: SimpleNamespace(main=lambda: None))
            run_alone()
        assert f"{name}: PENSTOCK_PROT in the environment is no option" in capsys.readouterr().err


def test_embedding_model_may_be_left_to_the_server(served: list[ServeOptions]) -> None:
    run_serve("some/model", "--embedding-model", "--embedding-name", "vectors")
    run_serve("some/model", "--embedding-model", "other/model")
    assert [options.embedding_model for options in served] == ["", "other/model"]
    named = backend_options(dataclasses.replace(served[0], embedding_model="other/model"))
    assert named["embedding backend"].model_id() == "vectors"


def test_short_help_fits_a_screen_and_long_help_has_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    for flag in ("-h", "--help"):
        monkeypatch.setattr(sys, "argv", ["penstock", "serve", flag])
        with pytest.raises(SystemExit):
            app(["serve", flag], console=Console(width=80))
        shown.append(capsys.readouterr().out)
    short, long = shown
    assert len(short.splitlines()) <= 24
    assert max(map(len, short.splitlines())) <= 80
    assert "--help shows all options." in short
    assert "--hang-timeout-s" in long
    assert "--hang-timeout-s" not in short


PANICKING = (
    '{"model": {"type": "BPE", "vocab": {}, "merges": []},'
    ' "normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}}'
)
"""A tokenizer.json of which the library panics."""


def test_answers_name_options_that_exist_and_never_answer_one_of_ours() -> None:
    named = {name for answer in ANSWER_OF.values() for name in re.findall(r"--[a-z-]+", answer)}
    assert named <= OURS
    assert ANSWER_OF.keys().isdisjoint(OURS)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--version"], result_action="return_value")
    assert capsys.readouterr().out == f"penstock {importlib.metadata.version('penstock')}\n"


@pytest.mark.parametrize("command", ["backend", "frontend"])
def test_processes_are_commands_of_penstock_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_line(capsys, command, "--worker", "2", status=2).startswith(f"{command}: Unknown option")
    app([command, "--version"], result_action="return_value")
    assert capsys.readouterr().out == f"{command} {importlib.metadata.version('penstock')}\n"


def test_model_is_taken_without_an_option(
    served: list[ServeOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_MODEL", "of/environment")
    for words in (["some/model", "--max-context", "20"], [], ["--model", "other/model"]):
        run_serve(*words)
    assert [options.model for options in served] == ["some/model", "of/environment", "other/model"]
    assert served[0].max_context == 20
    assert "the model is given twice" in one_line(capsys, "serve", "some/model", "--model", "other/model", status=2)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tokenizer.json", None, "no tokenizer.json in {}; copy it there"),
        ("tokenizer.json", "{}", "the tokenizer of the model {} cannot be used"),
        ("tokenizer.json", PANICKING, "the tokenizer of the model {} cannot be used: Precompiled"),
        ("chat_template.jinja", "{{ 9 ** (9 ** 9) }}", "line 1: a power has more than the limit of 4096 bits"),
        ("tokenizer.model", "no model", "{}/tokenizer.model: it cannot be used"),
        ("chat_template.jinja", "{% if %}", "the chat template has a syntax error in line 1"),
    ],
)
def test_unusable_texts_of_a_model_are_noticed_before_anything_starts(
    name: str,
    text: str | None,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    if name.startswith("tokenizer."):
        (model / "tokenizer.json").unlink()
    if text is not None:
        (model / name).write_text(text)
    line = refusal(capsys, "serve", str(model), status=1).splitlines()[-1]
    assert line.startswith("penstock serve: ")
    assert expected.format(model) in line


def test_hub_model_without_a_tokenizer_is_noticed_before_its_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[str] = []

    def download(*_: object, allow_patterns: list[str], **__: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("penstock.backend.checkpoint.hub.list_sizes", lambda *_: {})
    assert f"no tokenizer.json in {tmp_path}" in one_line(capsys, "serve", "owner/name")
    assert "tokenizer.json" in asked
    assert not [pattern for pattern in asked if pattern.endswith("safetensors")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "is not text in UTF-8"),
        (b"{% for %}", "syntax error in line 1"),
        (b"{{ 'x' * 3000000000 }}", "line 1: it takes more than the limit of 2"),
    ],
)
def test_unusable_chat_template_file_is_one_line(
    content: bytes | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    line = one_line(capsys, "serve", DEMO_MODEL, "--chat-template", str(path))
    assert f"--chat-template {path}" in line
    assert expected in line


def test_missing_certificate_says_what_it_must_be(capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(capsys, "serve", DEMO_MODEL, "--ssl-certfile", "/nowhere.pem")
    assert line == "penstock serve: /nowhere.pem: No such file or directory; give a file in PEM with the certificate"


def test_help_describes_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["--help"], console=Console(width=200))
    described = dict(re.findall(r"^│ (\S+) +(\S.*?) *│$", capsys.readouterr().out, re.MULTILINE))
    commands = {name for name in app if not name.startswith("-")}
    assert {"record", "replay", "serve", "timeline", "top", "upgrade"} <= commands
    assert commands - {"inspect"} <= described.keys()


@pytest.mark.parametrize(
    "command", [["serve"], ["inspect"], ["ray", "up"], ["bench", "routers"], ["bench", "attention"]]
)
def test_every_option_is_described_and_no_text_is_lost_as_markup(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        app([*command, "--help"], console=Console(width=2000))
    lines = re.findall(r"^│[ *]+(\S.*?)  +(.*?) *│$", capsys.readouterr().out, re.MULTILINE)
    assert lines
    for name, described in lines:
        text = re.sub(r"\[(env var|choices|default): [^]]*\]|\[required\]", "", described).strip()
        assert text, name
        assert "  " not in text, text  # a tag such as <think> outside backticks is taken for HTML
        assert "default: (" not in described, described


def test_reader_that_leaves_is_no_traceback() -> None:
    code = "from penstock.main import main; main()"
    argv = [sys.executable, "-P", "-c", code, "--version"]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_completion_for_a_shell_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        app(["--install-completion", "--shell", "bash"])
    assert not ended.value.code
    (script,) = tmp_path.rglob("completions/penstock")
    assert "--kv-budget" in script.read_text()


@pytest.mark.parametrize("command", ["bench", "chaos", "gpu-check", "random-model", "replay"])
def test_laboratory_command_without_a_checkout_says_so_in_one_line(command: str, tmp_path: Path) -> None:
    package = tmp_path / "penstock"
    package.mkdir()
    for entry in Path(penstock.__file__).parent.iterdir():
        if entry.name != "tools":  # as in a wheel
            (package / entry.name).symlink_to(entry.resolve())
    # The finder of an editable installation would find the checkout.
    code = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Editable' not in str(f)]\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}from penstock.main import main; main()", command, "--url", "x"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert f"{command} needs a checkout of the repository" in line
