"""The router of several servers: the shipped templates, run by HAProxy and nginx themselves."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.process.children import find_program
from penstock.serve.fleet.cluster import Server, as_targets
from penstock.serve.fleet.router import (
    BEGINNING,
    FILES,
    NUM_BEGINNING_BYTES,
    Router,
    RouterError,
    RouterKind,
    RouterSettings,
)
from penstock.tools.free_port import free_port
from tests.serve.fleet.upstreams import Upstream, ask, upstreams
from tests.system.processes import descendants, wait_until

KINDS: tuple[RouterKind, ...] = ("haproxy", "nginx")
NUM_SERVERS = 3
DEAD = Server(NUM_SERVERS, "127.0.0.1", 9)
"""Nobody listens on the discard port."""


class Running:
    """A router, where it listens, and what it has behind it."""

    def __init__(self, settings: RouterSettings, behind: list[Upstream]) -> None:
        self.kind, self.settings = settings.kind, settings
        self.router = Router(settings)
        self.port = int(settings.listen.rpartition(":")[2])
        self.behind = behind
        self.servers = [upstream.as_server for upstream in behind]

    def server_of(self, body: object, path: str = "/v1/completions", **headers: str) -> str:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        status, name = ask(self.port, path, json.dumps(body), sent)
        assert status == 200
        return name


@pytest.fixture(params=KINDS)
def running(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    kind: RouterKind = request.param
    if find_program(kind) is None:
        pytest.skip(f"{kind} is not installed: apt-get install haproxy nginx-light")
    with upstreams(NUM_SERVERS) as behind:
        running = Running(RouterSettings(kind, tmp_path / "router", f"127.0.0.1:{free_port()}"), behind)
        try:
            running.router.apply(running.servers)
            # nginx takes a new configuration at some later moment; the first one is there at once.
            yield running
        finally:
            for upstream in behind:
                upstream.may_end.set()
            pid = running.router.pid
            running.router.stop()
            wait_until(lambda: _refuses(running.port), 30.0)
            if pid is not None:  # a worker of HAProxy 2.6 that was reloaded may outlive its last stream
                for process in (*descendants(pid), pid):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def _refuses(port: int) -> bool:
    try:
        ask(port, "/")
    except OSError:
        return True
    return False


def chat(beginning: str, last: str) -> dict[str, object]:
    messages = [{"role": "system", "content": beginning}, {"role": "user", "content": last}]
    return {"model": "m", "temperature": 0, "messages": messages}


def test_prompts_that_begin_alike_go_to_one_server(running: Running) -> None:
    groups = [f"Group {number}: {'long ' * 300}" for number in range(12)]
    found = [{running.server_of(chat(group, str(number))) for number in range(4)} for group in groups]
    assert all(len(servers) == 1 for servers in found)
    assert len(set().union(*found)) > 1
    # Another endpoint, whose prompt begins with the same characters; and a body that the buffer does not hold.
    assert {running.server_of({"prompt": groups[0] + "!", "max_tokens": 1})} == found[0]
    assert {running.server_of(chat(groups[1] + "long " * 50_000, "?"))} == found[1]
    # A body without a prompt still goes somewhere.
    assert running.server_of({}) in {server.name for server in running.servers}


def test_clients_may_choose_the_key_and_tenants_do_not_meet(running: Running) -> None:
    keyed = [
        {running.server_of({"prompt": f"{key} {n}"}, X_Penstock_Prefix_Key=str(key)) for n in range(3)}
        for key in range(8)
    ]
    assert all(len(servers) == 1 for servers in keyed)
    assert len(set().union(*keyed)) > 1
    by_tenant = {running.server_of({"prompt": "the same"}, Authorization=f"Bearer {key}") for key in range(12)}
    assert len(by_tenant) > 1


def test_what_refers_to_an_answer_goes_to_the_server_that_gave_it(running: Running) -> None:
    for server in running.servers:
        mark = f"{server.number:04x}"
        stream, response = f"chatcmpl-{mark}00ff00ff", f"resp_0123abcd{mark}00ff00ff"
        assert ask(running.port, f"/v1/streams/{stream}") == (200, server.name)
        assert ask(running.port, f"/v1/streams/{response}") == (200, server.name)
        assert ask(running.port, f"/v1/responses/{response}?stream=true&starting_after=3") == (200, server.name)
        assert running.server_of({"prompt": "x"}, X_Penstock_Stream=stream) == server.name
        if running.kind == "haproxy":
            body = {"input": "and now?", "previous_response_id": response}
            assert running.server_of(body, "/v1/responses") == server.name
    # The server of these is not there any longer: another one answers that it does not know them.
    assert ask(running.port, "/v1/streams/chatcmpl-00ff0000")[0] == 200


def test_a_stale_entry_costs_a_retry_and_not_an_error(running: Running) -> None:
    running.router.apply([*running.servers, DEAD])
    live = {server.name for server in running.servers}
    assert {running.server_of({"prompt": f"prompt {number}"}) for number in range(40)} == live
    assert ask(running.port, f"/v1/streams/chatcmpl-{DEAD.number:04x}00")[0] == 200


def test_request_whose_server_dies_before_the_answer_is_sent_to_another(running: Running) -> None:
    first = running.server_of({"prompt": "who?"})
    others = {server.name for server in running.servers} - {first}
    for upstream in running.behind:
        if upstream.as_server.name in others:
            upstream.deaths.append(-1)  # only the first one dies
    assert running.server_of({"prompt": "who?"}, "/death") in others


def test_reloads_lose_neither_streams_nor_requests(running: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("GET", "/stream")
    response = connection.getresponse()
    name = response.read(5).decode()
    others = [server for server in running.servers if server.name != name]
    for number in range(6):  # its server leaves and comes back
        running.router.apply(others if number % 2 == 0 else running.servers)
        assert {ask(running.port, "/", str(each))[0] for each in range(10)} == {200}
    for upstream in running.behind:
        upstream.may_end.set()
    assert response.read().decode() == name
    connection.close()
    assert json.loads((running.settings.directory / "servers.json").read_text())[2]["labels"] == {
        "penstock_server": "s0002"
    }


def test_a_configuration_that_is_refused_changes_nothing(running: Running, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in running.settings.directory.glob("*.c*")}
    bad = tmp_path / "template"
    for text, said in (("nonsense here;\n", "refuses .*nonsense"), ("{{ unknown }}", "unknown")):
        bad.write_text(text)
        with pytest.raises(RouterError, match=said):
            Router(replace(running.settings, template=bad)).apply(running.servers)
    assert {path.name: path.read_bytes() for path in running.settings.directory.glob("*.c*")} == before
    assert ask(running.port, "/")[0] == 200


def test_files_that_cannot_be_written_are_the_routers_error(running: Running) -> None:
    draft = (running.settings.directory / FILES[running.settings.kind]).with_suffix(".new")
    draft.mkdir()
    with pytest.raises(RouterError, match="cannot be written"):
        Router(running.settings).apply(running.servers)
    assert ask(running.port, "/")[0] == 200


def test_the_next_command_finds_the_running_router(running: Running) -> None:
    again = Router(running.settings)
    assert again.pid == running.router.pid is not None
    again.apply([])
    assert again.pid == running.router.pid
    wait_until(lambda: ask(running.port, "/", "{}")[0] in (502, 503), 20.0)


def test_somebody_elses_router_is_reloaded_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.fleet.router.find_program", lambda _name: "/bin/true")
    command = f"cp {tmp_path}/router/haproxy.cfg {tmp_path}/seen"
    settings = RouterSettings("haproxy", tmp_path / "router", "127.0.0.1:1", reload_command=command)
    Router(settings).apply([DEAD])
    assert f"server s0003 {DEAD.address} id 4" in (tmp_path / "seen").read_text()
    with pytest.raises(RouterError, match="--router-reload failed: status 1"):
        Router(replace(settings, reload_command="false")).apply([])


def test_beginning_of_a_prompt_is_found_in_every_endpoints_body() -> None:
    pattern = re.compile(f"{BEGINNING}(.{{0,{NUM_BEGINNING_BYTES}}})", re.DOTALL)
    for field in ("prompt", "input", "instructions", "system", "query", "inputs"):
        found = pattern.search(json.dumps({"model": "m", field: "Once upon", "n": 1}))
        assert found is not None
        assert found[1].startswith("Once upon")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Once upon"}]}]
    for separators in ((",", ":"), (", ", ": ")):
        found = pattern.search(json.dumps({"messages": parts}, separators=separators))
        assert found is not None
        assert "Once upon" in found[1]
    tokens = pattern.search('{"prompt":[5,6,7]}')
    assert tokens is not None
    assert tokens[1].startswith("5,6,7")


def test_servers_are_checked_before_they_reach_a_configuration() -> None:
    assert Server(10, "::1", 80).address == "[::1]:80"
    for number, host, port in ((-1, "::1", 80), (1024, "::1", 80), (0, "::1", 0), (0, "::1", 65536), (0, "a b", 80)):
        with pytest.raises(ValueError, match=r"limit is 1023|from 1 to 65535|does not appear to be an IPv4 or IPv6"):
            Server(number, host, port)
    with pytest.raises(ValueError, match="one with a zone cannot be routed to"):
        Server(0, "::1%x\n listen", 80)
    assert json.loads(as_targets([])) == []
