"""The supervisor in its own process, with small children that report on a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.process.supervisor import describe_end, exit_status
from tests.system.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUPERVISE = """
import sys
from penstock.process.supervisor import ChildSpec, Supervisor
children = [
    ChildSpec(name, (sys.executable, "-c", code), stage=stage, reloads={reloads}, may_die_often={may_die_often},
        standby_option={standby_option!r})
    for name, code, stage in {children!r}
]
log = lambda line: print(line, file=sys.stderr, flush=True)
sys.exit(Supervisor(children, log=log, stop_timeout_s={stop_timeout_s}, settle_s={settle_s},
    first_pause_s=0.001, is_up={is_up}).run())
"""
# os.write instead of print: a signal handler must not print while a print is flushing (reentrant call).
SAY = "import os, signal, sys, time\nsay = lambda text: os.write(1, (text + ' ' + str(os.getpid()) + '\\n').encode())\n"
LIVE = SAY + "say('up')\nsignal.pause()"
OBEY = SAY + "signal.signal(signal.SIGTERM, lambda *_: (say('term'), sys.exit({status})))\nsay('up')\nsignal.pause()"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(
        *children: tuple[str, str, int],
        stop_timeout_s: float = 60.0,
        settle_s: float = 5.0,
        is_up: str = "None",
        reloads: bool = False,
        may_die_often: bool = False,
        standby_option: str | None = None,
    ) -> subprocess.Popen[str]:
        code = SUPERVISE.format(
            children=children,
            stop_timeout_s=stop_timeout_s,
            settle_s=settle_s,
            is_up=is_up,
            reloads=reloads,
            may_die_often=may_die_often,
            standby_option=standby_option,
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    return word, int(pid)


def test_killed_child_is_restarted(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(("worker", LIVE, 0))
    _, first = read(supervisor)
    os.kill(first, signal.SIGKILL)
    word, second = read(supervisor)
    assert word == "up"
    assert second != first
    supervisor.terminate()
    _, errors = supervisor.communicate()
    assert supervisor.returncode == 0
    assert "worker died by SIGKILL; restarting" in errors


def test_child_that_fails_at_once_is_not_restarted_and_gives_the_exit_status(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    supervisor = start(("backend", "import sys; sys.exit('no such model')", 0), ("frontend", LIVE, 1))
    _, errors = supervisor.communicate()
    assert supervisor.returncode == 1
    assert errors.count("no such model") == 1
    assert "backend exited with status 1 during its start; stopping" in errors


@pytest.mark.parametrize("may_die_often", [False, True])
def test_child_that_keeps_dying_in_its_start_is_given_up_with_its_status(
    start: Callable[..., subprocess.Popen[str]], may_die_often: bool
) -> None:
    dying = SAY + "say('up'); os.kill(os.getpid(), signal.SIGSEGV)"
    supervisor = start(("worker", dying, 0), may_die_often=may_die_often)
    output, errors = supervisor.communicate()
    assert supervisor.returncode == 128 + signal.SIGSEGV
    assert output.count("up") == 6
    assert "6 times in a row" in errors


@pytest.mark.parametrize("end", ["sys.exit(4)", "os.abort()"])
def test_child_that_may_die_often_is_restarted_for_as_long_as_the_server_runs(
    start: Callable[..., subprocess.Popen[str]], end: str
) -> None:
    supervisor = start(
        ("frail", SAY + f"say('up')\n{end}", 0), is_up="lambda: True", settle_s=1000.0, may_die_often=True
    )
    assert [read(supervisor)[0] for _ in range(8)] == ["up"] * 8  # one that may not is given up after six


def test_higher_stage_ends_before_the_lower_is_stopped(start: Callable[..., subprocess.Popen[str]]) -> None:
    last_words = SAY + (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.05), say('{name}-ends'), sys.exit(0)))\n"
        "say('up')\nsignal.pause()"
    )
    supervisor = start(
        ("backend", last_words.format(name="backend"), 0), ("frontend", last_words.format(name="frontend"), 1)
    )
    assert [read(supervisor)[0], read(supervisor)[0]] == ["up", "up"]
    supervisor.terminate()
    assert [read(supervisor)[0], read(supervisor)[0]] == ["frontend-ends", "backend-ends"]
    supervisor.communicate()
    assert supervisor.returncode == 0


def test_child_that_fails_while_stopping_is_logged(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(("worker", OBEY.format(status=7), 0))
    read(supervisor)
    supervisor.terminate()
    _, errors = supervisor.communicate()
    assert supervisor.returncode == 7
    assert "worker exited with status 7 while stopping" in errors


STUBBORN = SAY + "signal.signal(signal.SIGTERM, lambda *_: say('term'))\nsay('up')\nwhile True: signal.pause()"


def test_child_that_does_not_stop_is_killed_and_the_status_shows_it(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    supervisor = start(("worker", STUBBORN, 0), stop_timeout_s=0.2)
    read(supervisor)
    supervisor.terminate()
    supervisor.communicate()
    assert supervisor.returncode == 128 + signal.SIGKILL


def test_second_signal_reaches_the_children(start: Callable[..., subprocess.Popen[str]]) -> None:
    twice = SAY + (
        "count = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: (count.append(1), say('term'), len(count) == 2 and sys.exit(0)))\n"
        "say('up')\nwhile True: signal.pause()"
    )
    supervisor = start(("worker", twice, 0))
    read(supervisor)
    supervisor.terminate()
    assert read(supervisor)[0] == "term"
    supervisor.send_signal(signal.SIGINT)
    assert read(supervisor)[0] == "term"
    supervisor.communicate()
    assert supervisor.returncode == 0


def test_hangup_reloads_at_any_time_and_never_shortens_a_stop(start: Callable[..., subprocess.Popen[str]]) -> None:
    patient = SAY + (
        "for name in ('SIGTERM', 'SIGHUP'):\n"
        "    signal.signal(getattr(signal, name), lambda number, _: say(signal.Signals(number).name))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\nimport sys\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\n"
        "say('up')\nwhile True: signal.pause()"
    )
    supervisor = start(("worker", patient, 0), reloads=True)
    _, worker = read(supervisor)
    supervisor.send_signal(signal.SIGHUP)
    assert read(supervisor)[0] == "SIGHUP"
    supervisor.terminate()
    assert read(supervisor)[0] == "SIGTERM"
    supervisor.send_signal(signal.SIGHUP)
    assert read(supervisor)[0] == "SIGHUP"
    os.kill(worker, signal.SIGUSR1)
    output, _ = supervisor.communicate()
    assert output == ""  # no second SIGTERM
    assert supervisor.returncode == 0


def test_hangup_during_a_childs_start_reloads_it_when_it_is_up(start: Callable[..., subprocess.Popen[str]]) -> None:
    starting = SAY + (
        "say('starting')\nsignal.sigwait({signal.SIGUSR1})\n"
        "signal.signal(signal.SIGHUP, lambda *_: say('reloads'))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\nsignal.pause()"
    )
    # sigwait needs a blocked signal; the child is still in its first lines when SIGHUP comes.
    starting = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + starting
    supervisor = start(("worker", starting, 0), reloads=True)
    _, worker = read(supervisor)
    supervisor.send_signal(signal.SIGHUP)
    status = Path(f"/proc/{worker}/status")
    wait_until(lambda: int(status.read_text().partition("ShdPnd:\t")[2].split()[0], 16) & 1, 10.0)
    os.kill(worker, signal.SIGUSR1)
    assert read(supervisor) == ("reloads", worker)


def test_children_die_with_the_supervisor(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(("worker", STUBBORN, 0))
    read(supervisor)
    supervisor.kill()
    # The pipe ends when its last writer, the child, is gone.
    assert supervisor.stdout is not None
    assert supervisor.stdout.read() == ""


def test_children_start_with_no_blocked_signals_in_their_own_process_group(
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    code = SAY + (
        "say('mask-' + str(len(signal.pthread_sigmask(signal.SIG_BLOCK, []))))\n"
        "say('group-' + str(os.getpgid(0) == os.getpid()))\nsignal.pause()"
    )
    supervisor = start(("worker", code, 0))
    assert [read(supervisor)[0], read(supervisor)[0]] == ["mask-0", "group-True"]


@pytest.mark.parametrize(
    ("returncode", "status", "words"),
    [(0, 0, "exited with status 0"), (3, 3, "exited with status 3"), (-9, 137, "died by SIGKILL"), (-63, 191, "63")],
)
def test_end_is_described_in_words_and_as_a_status(returncode: int, status: int, words: str) -> None:
    assert exit_status(returncode) == status
    assert words in describe_end(returncode)


def test_exit_before_all_is_up_is_final_at_any_time(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(("backend", SAY + "say('up')\nsys.exit(4)", 0), settle_s=0.0, is_up="lambda: False")
    read(supervisor)
    _, errors = supervisor.communicate()
    assert supervisor.returncode == 4
    assert "backend exited with status 4 during its start; stopping" in errors


def test_exit_after_all_is_up_leads_to_a_restart(start: Callable[..., subprocess.Popen[str]]) -> None:
    wait_then_exit = SAY + "say('up')\nsys.stdin.read()\nsys.exit(4)"
    supervisor = start(("backend", wait_then_exit, 0), settle_s=0.0, is_up="lambda: True")
    assert read(supervisor)[0] == "up"
    assert read(supervisor)[0] == "up"


def test_exit_right_after_all_is_up_leads_to_a_restart(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    exit_on_usr1 = SAY + "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(4))\nsay('up')\nsignal.pause()"
    supervisor = start(
        ("backend", exit_on_usr1, 0), settle_s=1000.0, is_up="lambda: print('is-up', 0, flush=True) or True"
    )
    pids = dict(read(supervisor) for _ in range(2))
    os.kill(pids["up"], signal.SIGUSR1)
    word, again = read(supervisor)
    assert word == "up"
    assert again != pids["up"]


STANDBY = (
    SAY
    + """
from penstock.process.children import wait_for_turn
if len(sys.argv) > 1:
    say('waits')
    if not wait_for_turn(int(sys.argv[2])):
        sys.exit(3)
say('up')
signal.pause()
"""
)


def test_standby_waits_and_takes_the_place_of_a_killed_child(start: Callable[..., subprocess.Popen[str]]) -> None:
    supervisor = start(("worker", STANDBY, 0), settle_s=0.01, standby_option="--turn-fd")
    running = read(supervisor)[1]
    for _ in range(2):
        word, waiting = read(supervisor)
        assert word == "waits"
        os.kill(running, signal.SIGKILL)
        assert read(supervisor) == ("up", waiting)
        running = waiting
    _, waiting = read(supervisor)
    os.kill(waiting, signal.SIGKILL)
    wait_until(lambda: not is_alive(waiting), 10.0)
    os.kill(running, signal.SIGKILL)
    assert read(supervisor)[0] == "up"  # without one a new process starts
    supervisor.terminate()
    assert supervisor.wait() == 0
    assert not any(map(is_alive, (waiting, running)))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
