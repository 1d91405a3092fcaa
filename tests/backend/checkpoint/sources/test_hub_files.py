"""Files of a hub on this machine, with the real huggingface_hub."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

from penstock.backend.checkpoint.hub import fetch_small_files
from penstock.backend.errors import StartupError
from tests.hub_server import COMMIT, LocalHub, local_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REPOSITORY = {"M-Q4_K_M.gguf": b"four bits", "M-Q8_0.gguf": b"eight bits", "config.json": b"{}", "README.md": b""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    monkeypatch.chdir(tmp_path)
    with local_hub() as hub:
        hub.use(monkeypatch, tmp_path / "hub")
        hub.repositories["org/M-GGUF"] = REPOSITORY
        yield hub


def test_repository_of_ggufs_gives_one_by_rule_and_the_others_are_named(
    hub: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        path = fetch_small_files("https://huggingface.co/org/M-GGUF/tree/main")
    assert (path.name, path.read_bytes()) == ("M-Q4_K_M.gguf", b"four bits")
    assert hub.downloads() == ["M-Q4_K_M.gguf"]
    taken, size, *_ = (record.getMessage() for record in caplog.records if record.name.startswith("penstock"))
    assert taken == "org/M-GGUF: Q4_K_M (9 B) is taken; org/M-GGUF:TYPE takes another: Q8_0 (10 B)"
    assert size.startswith("Downloading org/M-GGUF: 9 B in 1 file(s), into ")


@pytest.mark.parametrize("model", ["org/M-GGUF:q8_0", "hf.co/org/M-GGUF:M-Q8_0.gguf", "hf://org/M-GGUF:Q8_0"])
def test_named_gguf_is_the_only_one_that_comes_and_comes_once(model: str, hub: LocalHub) -> None:
    for _ in range(2):
        assert fetch_small_files(model).read_bytes() == b"eight bits"
    assert hub.downloads() == ["M-Q8_0.gguf"]


def test_interrupted_download_goes_on_where_it_stopped(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # between attempts
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 5)  # what is kept of a broken answer
    hub.cut.add("org/M-GGUF")
    assert fetch_small_files("org/M-GGUF:Q8_0").read_bytes() == b"eight bits"
    assert hub.sent == [b"eight bits", b" bits"]


def test_damaged_download_is_refused_and_not_kept(hub: LocalHub, tmp_path: Path) -> None:
    hub.damaged.add("org/M-GGUF")
    with pytest.raises(StartupError, match=r"M-Q8_0\.gguf has the SHA-256 \w+, not \w+: it is damaged"):
        fetch_small_files("org/M-GGUF:Q8_0")
    assert not [path for path in (tmp_path / "hub").rglob("blobs/*") if path.read_bytes() == b"stib thgie"]
    hub.damaged.clear()
    assert fetch_small_files("org/M-GGUF:Q8_0").read_bytes() == b"eight bits"


def test_without_network_the_cache_serves(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_small_files("org/M-GGUF")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_small_files("org/M-GGUF") == path
    assert path.parent.name == COMMIT
    with pytest.raises(StartupError, match="has no GGUF file Q8_0; it has Q4_K_M"):
        fetch_small_files("org/M-GGUF:Q8_0")


def test_gated_model_needs_the_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("org/M-GGUF")
    with pytest.raises(StartupError, match="access to it must be granted on the hub, and HF_TOKEN set"):
        fetch_small_files("org/M-GGUF")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert fetch_small_files("org/M-GGUF").read_bytes() == b"four bits"


def test_model_with_safetensors_is_not_replaced_by_a_gguf(hub: LocalHub) -> None:
    hub.repositories["org/both"] = REPOSITORY | {"model.safetensors": b"", "tokenizer.json": b"{}"}
    path = fetch_small_files("org/both")
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "tokenizer.json"]
    assert fetch_small_files("org/both:Q4_K_M").name == "M-Q4_K_M.gguf"
    hub.repositories["org/none"] = {"config.json": b"{}"}
    with pytest.raises(StartupError, match="org/none has no GGUF file; leave :Q4_K_M out"):
        fetch_small_files("org/none:Q4_K_M")
