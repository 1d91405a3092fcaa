"""--model becomes a directory: local paths, and the hub with a fake snapshot_download.

tests/backend/checkpoint/sources/ has the real one, and a hub on this machine.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from penstock.backend.checkpoint.encoders.read_config import read_encoder
from penstock.backend.checkpoint.encoders.weights import open_encoder
from penstock.backend.checkpoint.hub import resolve_config, resolve_model
from penstock.backend.errors import StartupError
from penstock.backend.main import app
from tests.checkpoints import make_checkpoint
from tests.encoder_checkpoints import make_sentence_encoder

INDEX = "model.safetensors.index.json"


class FakeHub:
    """A fake snapshot_download: copies the files of a directory that match the patterns to a commit's directory."""

    def __init__(self, repository: Path, cache: Path) -> None:
        self.repository = repository
        self.snapshot = cache / ("c0ffee" + "0" * 34)
        self.calls: list[tuple[str, str | None]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self)
        monkeypatch.setattr("penstock.backend.checkpoint.hub.list_sizes", lambda *_: {})

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str], tqdm_class: object) -> str:
        self.calls.append((repo_id, revision))
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in self.repository.rglob("*"):
            name = str(file.relative_to(self.repository))
            if file.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                (self.snapshot / name).parent.mkdir(exist_ok=True)
                (self.snapshot / name).write_bytes(file.read_bytes())
        return str(self.snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "repository", tmp_path / "cache")
    fake.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return fake


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("penstock.backend.checkpoint.hub.list_sizes", lambda *_: {})


def test_directory_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the model directory .* has no config\.json"):
        resolve_model(str(tmp_path))


def test_lora_adapter_or_a_directory_of_ggufs_is_named_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        StartupError,
        match=r"it is a LoRA adapter .* the adapter as --lora-modules",
    ):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    for name in ("small.gguf", "tall.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(StartupError, match=r"it has 2 GGUF models: give one, such as .*small\.gguf"):
        resolve_model(str(tmp_path))


def test_file_as_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(StartupError, match=r"model\.safetensors is a file; give the directory .*, or a GGUF"):
        resolve_model(str(file))


@pytest.mark.parametrize("model", ["/no/such/place", "./here", "../there", "a/b/c", "", "a b", "x\ny", "--help"])
def test_name_that_cannot_be_a_hub_id_is_a_missing_directory(model: str, hub: FakeHub) -> None:
    hub.repository.mkdir()
    with pytest.raises(StartupError, match=r"does not exist|has no config") as refused:
        resolve_model(model)
    assert "\n" not in str(refused.value)
    assert hub.calls == []


def test_single_file_model_is_downloaded_without_unused_files(hub: FakeHub) -> None:
    make_checkpoint("llama2", hub.repository)
    for name in ("consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors", "README.md"):
        (hub.repository / name).parent.mkdir(exist_ok=True)
        (hub.repository / name).write_bytes(b"large")
    assert resolve_model("owner/name", "main") == hub.snapshot
    assert {file.name for file in hub.snapshot.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_modules_of_sentence_transformers_come_with_the_config(hub: FakeHub) -> None:
    make_sentence_encoder("bert", hub.repository, {"pooling_mode_mean_tokens": True}, dense=8)
    (hub.repository / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    (hub.repository / "2_Dense" / "pytorch_model.bin").write_bytes(b"large")
    config = read_encoder(resolve_config("owner/name"))
    assert (config.max_context_tokens, config.heads[0].pooling, config.normalizes) == (20, ("mean",), True)
    assert not list(hub.snapshot.rglob("*.safetensors"))
    with open_encoder(resolve_model("owner/name"), config):
        assert not list(hub.snapshot.rglob("*.bin"))


def test_shards_are_downloaded_by_the_names_in_the_index_at_the_same_commit(hub: FakeHub) -> None:
    make_checkpoint("llama2", hub.repository, max_shard_size="60KB")
    (hub.repository / "tokenizer.json").write_text("{}")
    resolve_model("owner/name", "v1.0")
    shards = set(json.loads((hub.repository / INDEX).read_text())["weight_map"].values())
    assert len(shards) > 2
    assert {file.name for file in hub.snapshot.glob("*.safetensors")} == shards
    assert hub.calls == [("owner/name", "v1.0"), ("owner/name", hub.snapshot.name)]


def test_resolve_config_downloads_only_the_config(hub: FakeHub) -> None:
    make_checkpoint("llama2", hub.repository, max_shard_size="60KB")
    assert resolve_config("owner/name", "v1.0") == hub.snapshot
    assert [file.name for file in hub.snapshot.iterdir()] == ["config.json"]
    assert hub.calls == [("owner/name", "v1.0")]


def test_dry_run_of_a_hub_model_downloads_only_its_config(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("llama2", hub.repository)
    app(["--dry-run", "--model", "owner/name"], result_action="return_value")
    assert "KV budget" in capsys.readouterr().out
    assert [file.name for file in hub.snapshot.iterdir()] == ["config.json"]


def test_impossible_plan_is_refused_before_weights_are_downloaded(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint("llama2", hub.repository)
    with pytest.raises(SystemExit):
        app(["--model", "owner/name", "--kv-budget", "10B", "--socket", str(tmp_path / "s" / "b.sock")])
    assert "--kv-budget is 10 B" in capsys.readouterr().err
    assert [file.name for file in hub.snapshot.iterdir()] == ["config.json"]


def test_weights_come_from_the_commit_of_the_planned_config(hub: FakeHub) -> None:
    make_checkpoint("llama2", hub.repository)
    (hub.repository / "tokenizer.json").write_text("{}")
    config_dir = resolve_config("owner/name", "main")
    assert (resolve_model("owner/name", "main", config_dir) / "model.safetensors").is_file()
    assert [revision for _, revision in hub.calls] == ["main", hub.snapshot.name, hub.snapshot.name]


@pytest.mark.parametrize("name", ["model", "c0ffee" + "0" * 34])
def test_directory_is_its_own_config_and_model_under_any_name(tmp_path: Path, name: str) -> None:
    model = tmp_path / name
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert resolve_model(str(model), None, resolve_config(str(model))) == model


def test_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError, match=r"--revision is 'v1'; the model .* is a directory.*: remove --revision"):
        resolve_config(str(tmp_path), "v1")


def test_hub_model_without_a_config_is_refused(hub: FakeHub) -> None:
    hub.repository.mkdir()
    with pytest.raises(StartupError, match=r"the hub's model owner/name has no config\.json"):
        resolve_model("owner/name")


def response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.test"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.GatedRepoError("no", response=response(403)), "access to it must be granted"),
        (errors.RevisionNotFoundError("no", response=response(404)), "the hub has no such revision"),
        (errors.RepositoryNotFoundError("no", response=response(404)), "no such directory here and no such model"),
        (errors.LocalEntryNotFoundError("no"), "not in the hub's cache, and the hub cannot be reached"),
        (errors.HfHubHTTPError("500 from the hub\nlong story", response=response(500)), "500 from the hub"),
        (httpx2.ConnectError("connection refused"), "connection refused"),
        (OSError("No space left on device"), "No space left on device"),
        (OSError(), "OSError"),
    ],
)
def test_every_hub_failure_is_one_line(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(error, monkeypatch)
    with pytest.raises(StartupError) as refused:
        resolve_model("owner/name", "v9")
    assert str(refused.value).startswith("the model owner/name at revision v9 cannot be loaded: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_offline_without_a_cached_copy_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StartupError, match=r"owner/name cannot be loaded: .*not in the hub's cache"):
        resolve_model("owner/name")
