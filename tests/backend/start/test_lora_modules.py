"""--lora-modules: how adapters are named, and what a backend refuses before it loads anything."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassSpec
from penstock.backend.options import BackendOptions
from penstock.backend.start.lora_modules import NamedAdapter, announce, check_unchanged, read_adapters
from penstock.backend.start.pass_checks import check_adapters
from penstock.backend.start.runtime_adapters import RuntimeAdapters, with_kept_adapters
from penstock.backend.start.startup import pass_options
from penstock.shm.messages import MAX_ADAPTERS


def test_both_spellings_name_an_adapter(tmp_path: Path) -> None:
    given = [f"sql={tmp_path}", json.dumps({"name": "chat", "path": str(tmp_path), "base_model_name": "m"})]
    assert read_adapters(given, ("m",)) == (NamedAdapter("sql", tmp_path), NamedAdapter("chat", tmp_path))
    options = BackendOptions(gpu="none", lora_modules=tuple(given))
    assert pass_options(options).adapters == (tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["{dir}"], "write --lora-modules NAME=DIR"),
        (["sql="], "write --lora-modules NAME=DIR"),
        (["-x={dir}"], "a name is 1 to 128 letters"),
        (['{"name": "sql"}'], "missing required field `path`"),
        (["m={dir}"], "'m' is the name of the model or of another adapter"),
        (["sql={dir}", "sql={dir}"], "'sql' is the name of the model or of another adapter"),
        (["sql={dir}/none"], "the directory .*none of sql does not exist"),
        ([f"a{number}={{dir}}" for number in range(MAX_ADAPTERS + 1)], f"{MAX_ADAPTERS + 1} adapters; the limit is"),
    ],
)
def test_badly_named_adapters_are_refused(given: list[str], match: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=match):
        read_adapters([text.replace("{dir}", str(tmp_path)) for text in given], ("m", "n"))


def test_pass_must_have_the_adapters() -> None:
    spec = PassSpec(8, 64, {"fp32": 4})
    check_adapters(spec, 0)
    with pytest.raises(
        StartupError, match=r"--lora-modules: this forward pass applies no adapters; the built-in decoder does"
    ):
        check_adapters(spec, 1)
    with pytest.raises(StartupError, match="has 1 adapter_ranks for 2 adapters"):
        check_adapters(replace(spec, adapter_ranks=(4,)), 2)


def test_announcement_needs_the_adapters_files_as_they_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"adapter_config.json cannot be opened"):
        announce([NamedAdapter("sql", tmp_path)], (4,))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    (adapter,) = announce([NamedAdapter("sql", tmp_path)], (4,))
    assert (adapter.name, adapter.rank) == ("sql", 4)
    assert adapter.created > 0
    check_unchanged([NamedAdapter("sql", tmp_path)], (adapter,))
    (tmp_path / "adapter_model.safetensors").write_text("{ }")
    with pytest.raises(StartupError, match="the files of sql have changed"):
        check_unchanged([NamedAdapter("sql", tmp_path)], (adapter,))


def test_list_of_adapters_survives_a_kill_within_its_write_and_changed_files(tmp_path: Path) -> None:
    """What is behind the first line belongs to an older list."""
    for name in ("sql", "chat", "gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    fd = os.memfd_create("adapters")
    options = BackendOptions(gpu="none", lora_dir=tmp_path, adapters_fd=fd)
    rules = RuntimeAdapters(options, tmp_path)
    assert rules.kept == []
    directories = {name: rules.find_directory(name, name) for name in ("sql", "chat", "gone")}
    ids = {name: rules.announce(name, directory, 1).adapter_id for name, directory in directories.items()}
    rules.remember({name: (directory, ids[name]) for name, directory in directories.items()})
    os.pwrite(fd, b'}]older"}]', os.fstat(fd).st_size)
    (tmp_path / "gone" / "adapter_model.safetensors").write_text("others")
    restarted, _ = with_kept_adapters(replace(options, lora_modules=(f"chat={tmp_path}/sql",)))
    assert restarted.lora_modules == (f"chat={tmp_path}/sql", f"sql={tmp_path}/sql")
    os.close(fd)


def test_list_of_adapters_changes_only_while_one_backend_has_read_it(tmp_path: Path) -> None:
    fd = os.memfd_create("adapters")
    options = BackendOptions(gpu="none", lora_dir=tmp_path, adapters_fd=fd)
    old = RuntimeAdapters(options, tmp_path)
    with old.changing() as is_alone:
        assert is_alone
    new = RuntimeAdapters(options, tmp_path)
    for rules in (old, new, old):
        with rules.changing() as is_alone:
            assert not is_alone
    assert old._lock_fd is not None
    os.close(old._lock_fd)  # as its end does
    with new.changing() as is_alone:
        assert is_alone
    os.close(fd)


def test_path_that_is_none_is_refused_by_the_field(tmp_path: Path) -> None:
    rules = RuntimeAdapters(BackendOptions(gpu="none", lora_dir=tmp_path), tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to(os.fsdecode(b"not-utf8-\xff"))
    for path in ("a\0b", "n" * 256, "circle", "link"):
        with pytest.raises(StartupError, match=r"^lora_path: .* is no usable path: .*$"):
            rules.find_directory("sql", path)


def test_directory_of_adapters_must_exist(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--lora-dir: the directory .*none does not exist"):
        with_kept_adapters(BackendOptions(lora_dir=tmp_path / "none"))
