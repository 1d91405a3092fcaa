"""Unix sockets and TLS with the real command, real sockets and generated certificates."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from penstock.frontend.main import listening_socket
from penstock.frontend.options import FrontendOptions
from penstock.frontend.transport.serving.connections import RESERVED_FDS
from penstock.frontend.transport.serving.listening import unlink
from penstock.frontend.transport.serving.tls import ServerTls, TlsError, TlsFiles
from tests.frontend.test_main import BODY, Frontend, directory, run_to_its_end, scripted, start
from tests.shm.scripted_backend import BackendProcess

__all__ = ["directory", "scripted", "start"]  # fixtures

PASSWORD = "a pass phrase"


EC = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def make_certificate(
    folder: Path, name: str = "localhost", *, encrypted: bool = False, kind: tuple[str, ...] = EC
) -> tuple[Path, Path]:
    """Write a certificate and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    how = ["-passout", f"pass:{PASSWORD}"] if encrypted else ["-nodes"]
    argv = ["openssl", "req", "-x509", "-newkey", *kind, *how, "-days", "2"]
    argv += ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*argv, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder)
    make_certificate(folder, "other")
    make_certificate(folder, "rsa", kind=("rsa:2048",))
    make_certificate(folder, "encrypted", encrypted=True)
    return folder


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


# TLS


def test_https_clients_are_served_streaming_and_not(
    scripted: BackendProcess, start: Callable[..., Frontend], certificates: Path
) -> None:
    files = certificates / "localhost.pem", certificates / "localhost.key"
    frontend = start("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]), "--workers", "2")
    address = str(frontend.client.base_url)
    assert address.startswith("https://127.0.0.1:")
    frontend.wait_for("serving scripted")
    with httpx.Client(base_url=address, verify=trusting(files[0]), timeout=60) as client:
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "the cat"
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True, "max_tokens": 50}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
    socket_url = address.replace("https:", "wss:") + "/v1/responses"
    with connect(socket_url, ssl=trusting(files[0]), proxy=None) as web_socket:
        web_socket.send("{}")
        assert json.loads(web_socket.recv(60))["error"]["param"] == "type"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health", verify=trusting(certificates / "other.pem"))
    plain = address.replace("https:", "http:")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{plain}/health")
    frontend.process.terminate()
    assert frontend.end() == 0


def test_sighup_loads_a_new_certificate_and_keeps_the_old_one_if_it_is_bad(
    scripted: BackendProcess, start: Callable[..., Frontend], certificates: Path, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    frontend = start("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    address = frontend.client.base_url

    def subject() -> str:
        pem = ssl.get_server_certificate((address.host, address.port or 0))
        shown = subprocess.run(
            ["/usr/bin/env", "openssl", "x509", "-noout", "-subject"],
            input=pem,
            capture_output=True,
            text=True,
            check=True,
        )
        return shown.stdout.strip().rpartition("=")[2].strip()

    frontend.wait_for("serving scripted")
    assert subject() == "first"
    second = make_certificate(tmp_path, "second")
    second[1].replace(key)
    second[0].replace(certificate)
    frontend.process.send_signal(signal.SIGHUP)
    frontend.wait_for("read the certificate again")
    assert subject() == "second"
    certificate.write_text("no longer PEM")
    frontend.process.send_signal(signal.SIGHUP)
    frontend.wait_for("kept the old certificate")
    assert subject() == "second"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (("none.pem", None), "none.pem: No such file"),
        (("localhost.pem", "none.key"), "none.key: No such file"),
        (("localhost.pem", "other.key"), "does not belong to the certificate in"),
        (("localhost.pem", None), "do not contain a certificate and its key in PEM"),
        (("localhost.key", "localhost.key"), "do not contain a certificate and its key in PEM"),
        (("encrypted.pem", "encrypted.key"), "is encrypted: set PENSTOCK_SSL_KEYFILE_PASSWORD"),
        (("", None), "No such file"),
    ],
)
def test_unusable_tls_files_are_reported_in_one_line(
    certificates: Path, directory: Path, files: tuple[str, str | None], expected: str
) -> None:
    options = [f"--ssl-certfile={certificates / files[0] if files[0] else 'none-here'}"]
    if files[1] is not None:
        options.append(f"--ssl-keyfile={certificates / files[1]}")
    status, output = run_to_its_end(directory, "--port", "0", *options)
    assert status == 1
    assert expected in output
    assert output.count("\n") == 1


def test_key_without_a_certificate_is_named(directory: Path) -> None:
    assert run_to_its_end(directory, "--ssl-keyfile", "x") == (1, "frontend: --ssl-keyfile needs --ssl-certfile\n")


def test_encrypted_key_is_opened_with_its_password(certificates: Path) -> None:
    files = str(certificates / "encrypted.pem"), str(certificates / "encrypted.key")
    tls = ServerTls(TlsFiles(*files, PASSWORD))
    assert shown(tls) == (certificates / "encrypted.pem").read_text()
    assert tls.context.minimum_version >= ssl.TLSVersion.TLSv1_2
    for wrong, expected in (("x", "the password is wrong"), ("x" * 1025, "the limit is 1024")):
        with pytest.raises(TlsError, match=expected):
            ServerTls(TlsFiles(*files, wrong))


def test_certificate_and_its_key_may_be_in_one_file(certificates: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes((certificates / "localhost.pem").read_bytes() + (certificates / "localhost.key").read_bytes())
    assert shown(ServerTls(TlsFiles(str(both)))) == (certificates / "localhost.pem").read_text()


def shown(tls: ServerTls, server_name: str | None = None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> str:
    """Return the certificate that a client receives, in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, version
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=server_name)
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server) * 3:
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return ssl.DER_cert_to_PEM_cert(certificate)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("server_name", [None, "localhost"])
def test_half_of_a_new_certificate_pair_changes_nothing(
    certificates: Path, tmp_path: Path, server_name: str | None, version: ssl.TLSVersion
) -> None:
    served = tmp_path / "served.pem", tmp_path / "served.key"

    def put(name: str, *, with_key: bool = True) -> str:
        if with_key:
            shutil.copy(certificates / f"{name}.key", served[1])
        return str(shutil.copyfile(certificates / f"{name}.pem", served[0]).read_text())

    first = put("localhost")
    tls = ServerTls(TlsFiles(str(served[0]), str(served[1])))
    assert shown(tls, server_name, version) == first
    put("other", with_key=False)
    with pytest.raises(TlsError, match="does not belong to the certificate"):
        tls.reload()
    assert shown(tls, server_name, version) == first
    for name in ("other", "rsa", "localhost"):  # a key of another type is not added to the old one
        new = put(name)
        tls.reload()
        assert shown(tls, server_name, version) == new


def test_connections_without_a_handshake_count_and_are_closed_for_new_ones(
    start: Callable[..., Frontend], certificates: Path
) -> None:
    files = certificates / "localhost.pem", certificates / "localhost.key"
    frontend = start("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]), max_fds=RESERVED_FDS + 20)
    frontend.wait_for("no backend yet")
    address = frontend.client.base_url
    with contextlib.ExitStack() as stack, httpx.Client(base_url=address, verify=trusting(files[0])) as client:
        silent = [
            stack.enter_context(socket.create_connection((address.host, address.port or 0), timeout=5))
            for _ in range(21)
        ]
        # No connection has been idle long enough to be closed for a new one, and no handshake has timed out.
        with contextlib.suppress(ConnectionResetError):
            assert silent[-1].recv(1) == b""
        frontend.wait_for("20 connections, the limit of this worker")
        status = 0
        while not status:
            with contextlib.suppress(httpx.TransportError):
                status = client.get("/health").status_code
        assert status == 200
        with contextlib.suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""


def test_idle_tls_connection_does_not_keep_the_server_from_stopping(
    start: Callable[..., Frontend], certificates: Path
) -> None:
    files = certificates / "localhost.pem", certificates / "localhost.key"
    frontend = start("--ssl-certfile", str(files[0]), "--ssl-keyfile", str(files[1]))
    address = frontend.client.base_url
    with httpx.Client(base_url=address, verify=trusting(files[0])) as client:
        assert client.get("/health").status_code == 200
        with socket.create_connection((address.host, address.port or 0)):  # and one without a handshake
            frontend.process.terminate()
            assert frontend.process.wait(timeout=15) == 0  # half of uvloop's timeout for the client's confirmation


# Unix sockets


def unix_client(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60)


def test_unix_socket_replaces_the_port(
    scripted: BackendProcess, start: Callable[..., Frontend], directory: Path
) -> None:
    path = directory / "web.sock"
    frontend = start("--uds", str(path), "--uds-mode", "600", "--workers", "2")
    assert "listening on unix:" in frontend.log
    frontend.wait_for("serving scripted")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with unix_client(path) as client:
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "the cat"
        with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"
    status, output = run_to_its_end(directory, "--uds", str(path))
    assert (status, output) == (1, f"frontend: --uds {path} is in use by another server\n")
    frontend.process.terminate()
    assert frontend.end() == 0
    assert not path.exists()


def test_only_the_stale_socket_of_a_killed_server_is_replaced(start: Callable[..., Frontend], directory: Path) -> None:
    path = directory / "web.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    frontend = start("--uds", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with unix_client(path) as client:
        assert client.get("/health").status_code == 200
    frontend.process.kill()
    precious = directory / "precious"
    precious.write_text("kept")
    status, output = run_to_its_end(directory, "--uds", str(precious))
    assert (status, output) == (
        1,
        f"frontend: --uds {precious} exists and is not a socket; remove it\n",
    )
    assert precious.read_text() == "kept"


def test_unlink_keeps_another_servers_socket(directory: Path) -> None:
    path, next_path = directory / "web.sock", directory / "next.sock"
    first = listening_socket(FrontendOptions(uds=path), "frontend")
    second = listening_socket(FrontendOptions(uds=next_path), "frontend")
    with first, second:
        next_path.replace(path)
        unlink(first)
        assert path.is_socket()
        second.path = path  # type: ignore[attr-defined] # as if it had been bound there
        unlink(second)
        assert not path.exists()
        unlink(second)


def test_one_of_several_servers_starting_over_a_stale_socket_serves(directory: Path) -> None:
    path = directory / "web.sock"
    code = (
        "import sys\nfrom pathlib import Path\nfrom penstock.frontend.main import listening_socket\n"
        "from penstock.frontend.options import FrontendOptions\nprint('set', flush=True)\nsys.stdin.readline()\n"
        "listening = listening_socket(FrontendOptions(uds=Path(sys.argv[1])), 'frontend')\n"
        "print('serves', flush=True)\nsys.stdin.readline()"
    )
    argv = [sys.executable, "-c", code, str(path)]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(
                subprocess.Popen(argv, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True, bufsize=1)
            )
            for _ in range(2)
        ]
        for server in servers:
            stack.callback(server.kill)
            assert server.stdout is not None
            assert server.stdout.readline() == "set\n"
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        for server in servers:
            assert server.stdin is not None
            server.stdin.write("\n")
        assert sorted(server.stdout.readline() for server in servers if server.stdout is not None) == ["", "serves\n"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize(
    ("options", "expected_status", "expected"),
    [
        (("--uds", "/tmp/" + "x" * 120), 1, "the limit is 107"),  # noqa: S108 - never made
        (("--uds", "/nowhere/at/all.sock"), 1, "No such file"),
        (("--uds", "x.sock", "--uds-mode", "999"), 2, "not a file mode in octal"),
        (("--cors-allow-origin", "chat.example.org"), 1, "is not an origin"),
        (("--api-key-file", "/nowhere"), 1, "/nowhere: No such file"),
        (("--api-key", "a,a"), 1, "the keys key-1 and key-2 are the same"),
    ],
)
def test_invalid_option_is_reported_in_one_line(
    directory: Path, options: tuple[str, ...], expected_status: int, expected: str
) -> None:
    status, output = run_to_its_end(directory, *options)
    assert status == expected_status
    assert expected in output
    assert output.count("\n") == 1


# Keys from a file, and a limit that two workers share


def test_sighup_reloads_the_key_file_and_all_workers_keep_its_limits(
    scripted: BackendProcess, start: Callable[..., Frontend], directory: Path
) -> None:
    keys = directory / "keys"
    keys.write_text("sk-one name=one requests_per_minute=6\nsk-two\n")
    frontend = start("--api-key-file", str(keys), "--workers", "2")
    for _ in range(2):
        frontend.wait_for("serving scripted")

    def ask(key: str) -> int:
        # A new connection each time, so that either worker may answer.
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(frontend.client.base_url.join("/v1/completions"), json=BODY, headers=headers).status_code

    assert [ask("sk-one") for _ in range(8)] in ([200] * 6 + [429] * 2, [200] * 7 + [429])  # a minute may end
    keys.write_text("sk-one name=one\n")
    frontend.process.send_signal(signal.SIGHUP)
    for _ in range(2):
        frontend.wait_for("read the API keys again")
    assert {ask("sk-one") for _ in range(4)} == {200}
    assert {ask("sk-two") for _ in range(4)} == {401}
    keys.write_text("sk-one nonsense\n")
    frontend.process.send_signal(signal.SIGHUP)
    for _ in range(2):
        frontend.wait_for("kept the old API keys")
    assert ask("sk-one") == 200
    frontend.workers()[0].kill()
    frontend.wait_for("CRITICAL penstock.worker: cannot start: .*line 1: word 2 is unknown")
    assert "Traceback" not in frontend.log
    keys.write_text("sk-one name=one\n")
    frontend.wait_for("serving scripted")
    for process in (frontend.process.pid, *(worker.pid for worker in frontend.workers())):
        assert b"sk-" not in Path(f"/proc/{process}/cmdline").read_bytes()
    assert "sk-" not in frontend.log
