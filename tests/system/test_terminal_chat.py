"""`penstock chat` with its input from a pipe, against a real server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from typing import TYPE_CHECKING

from penstock.process.children import module_argv
from penstock.tools.free_port import free_port

if TYPE_CHECKING:
    from pathlib import Path


def talk(url: str, *lines: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    argv = module_argv("penstock.main", ["chat", "--url", url, *options])
    return subprocess.run(argv, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)


def test_conversation_is_answered_and_saved(served_demo: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    options = ("--temperature", "0", "--max-tokens", "8", "--system", "Be brief.")
    done = talk(
        served_demo,
        "What does\\",
        "os.path.join do?",
        "/retry",
        "/nonsense",
        f"/save {saved}",
        "/new",
        "/save",
        "/quit",
        "never asked",
        options=options,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.split("no such command: /nonsense; /help lists them\n")
    assert rest == ["/save needs the name of a file\n"]
    system, question, answer = json.loads(saved.read_text())
    assert (system["content"], question["content"]) == ("Be brief.", "What does\nos.path.join do?")
    assert first == 2 * (answer["content"] + "\n")


def test_refusal_is_printed_and_the_conversation_goes_on(served_demo: str) -> None:
    done = talk(served_demo, "x" * 100_000, "Hello", options=("--max-tokens", "1"))
    assert done.returncode == 0
    refusal, answer = done.stdout.split("\n", 1)
    assert refusal.startswith("the server answers with status 400: ")
    assert answer


def test_run_answers_with_a_server_of_its_own_that_ends_with_it(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}

    def penstock(*words: str) -> subprocess.CompletedProcess[str]:
        argv = module_argv("penstock.main", words)
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)

    done = penstock("run", "penstock-demo", "How do I sort a list?", "--max-tokens", "8", "--temperature", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert penstock("ps").stdout == "no server of this user runs; penstock serve starts one\n"
    failed = penstock("run", str(tmp_path / "nothing"), "?")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (1, "", 1)


def test_run_asks_the_server_that_has_the_model(served_demo: str) -> None:
    done = subprocess.run(
        module_argv("penstock.main", ["run", "penstock-demo", "Hello", "--url", served_demo, "--max-tokens", "1"]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_server_ends_with_one_line() -> None:
    done = talk(f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "start one with penstock serve, or give --url" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_stops_the_answer_and_not_the_program(served_demo: str) -> None:
    terminal, inside = pty.openpty()
    argv = module_argv("penstock.main", ["chat", "--url", f"{served_demo}/v1", "--temperature", "1.9"])
    with subprocess.Popen(argv, stdin=inside, stdout=inside, stderr=inside, start_new_session=True) as chat:
        os.close(inside)
        output = b""

        def read_until(text: bytes) -> None:
            nonlocal output
            while text not in output:
                output += os.read(terminal, 4096)

        read_until(b"> ")
        os.write(terminal, b"Write without an end\n")
        read_until(b"an end\r\n")
        output = output.partition(b"an end\r\n")[2]
        while not output.strip():
            output += os.read(terminal, 4096)
        chat.send_signal(signal.SIGINT)
        read_until(b"> ")
        os.write(terminal, b"/quit\n")
        assert chat.wait() == 0
    os.close(terminal)
