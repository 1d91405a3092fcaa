"""Downloaded packages become one archive, which the check's `--peers` understands."""

from __future__ import annotations

import importlib
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.backend.passes.decoder.ops import HeadShape
from penstock.tools.gpu_check.kernel_speed import attention_peers
from penstock.tools.gpu_check.pack_peers import VLLM_LIBRARY, main
from tests.tools.gpu_check.device_context import Record, make_device_context


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """A wheel of FlashAttention 3's layout, and nano-vllm's sources."""
    wheel, sources = tmp_path / "flash_attn_3-3.0.0-py3-none-any.whl", tmp_path / "nano-vllm"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flash_attn_interface.py", "import flash_attn_3\n")
        archive.writestr("flash_attn_3/__init__.py", "")
        archive.writestr("flash_attn_3-3.0.0.dist-info/METADATA", "Name: flash-attn-3\n")
    (sources / "nanovllm").mkdir(parents=True)
    (sources / "nanovllm" / "__init__.py").write_text("from nanovllm.llm import LLM\n")
    (sources / "nanovllm" / "llm.py").write_text("class LLM: pass\n")
    return wheel, sources


def test_archive_has_the_packages_and_they_were_imported(
    tmp_path: Path, sources: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "peers.tar.xz"
    assert main(["--out", str(out), *map(str, sources)]) == 0
    with tarfile.open(out) as archive:
        names = set(archive.getnames())
    assert {
        "peers/flash_attn_interface.py",
        "peers/nanovllm/llm.py",
        "peers/flash_attn_3-3.0.0.dist-info/METADATA",
    } <= names
    assert not any("__pycache__" in name for name in names)
    assert "cannot be imported" not in capsys.readouterr().out


def test_of_vllms_wheel_only_flash_attention_3_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The operator's machine code does not load here, which is said; the archive is written."""
    wheel, out = tmp_path / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl", tmp_path / "peers.tar.xz"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr(VLLM_LIBRARY, b"machine code")
    assert main(["--out", str(out), str(wheel)]) == 1
    assert "flash_attn_interface cannot be imported here: OSError: " in capsys.readouterr().out
    with tarfile.open(out) as archive:
        names = {name.removeprefix("peers/") for name in archive.getnames()}
    assert names == {
        "peers", "_vllm_fa3_C.abi3.so", "flash_attn_interface.py", "flash_attn_3-3.0.0.dist-info",
        "flash_attn_3-3.0.0.dist-info/METADATA", "flash_attn_3-3.0.0.dist-info/RECORD",
    }  # fmt: skip


@pytest.fixture
def functions() -> Iterator[ModuleType]:
    """The functions over vLLM's operator, of which a stand-in with its schema computes in plain torch."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(SCHEMA)
    library.impl("fwd", attend_plainly, "CPU")
    yield importlib.import_module("penstock.tools.gpu_check.kernel_speed.flash_attn_3_of_vllm")
    library._destroy()


SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,"
    " int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,"
    " Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right,"
    " float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,"
    " int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
"""The operator's schema in vllm-0.33.0."""


def attend_plainly(*arguments: Any) -> list[Tensor]:
    names = [part.split()[-1] for part in SCHEMA[4 : SCHEMA.rindex(")")].split(",")]
    given = dict(zip(names, arguments, strict=True))
    assert given["window_size_left"] == given["window_size_right"] == -1
    assert given["cp_world_size"] == 1
    q, k, v, lengths, starts = (given[name] for name in ("q", "k", "v", "seqused_k", "cu_seqlens_q"))
    rows = list(q) if starts is None else list(q.split(torch.diff(starts).tolist()))
    outs = []
    for number, row in enumerate(rows):
        keys, values = k, v
        if given["page_table"] is not None:
            pages = given["page_table"][number].long()
            keys, values = (x[pages].flatten(0, 1)[: lengths[number]] for x in (k, v))
        elif starts is None:
            raise RuntimeError("This flash attention build only supports varlen (for build size reasons).")
        else:
            first, end = given["cu_seqlens_k"][number : number + 2].tolist()
            keys, values = k[first:end], v[first:end]
        mask = torch.ones(len(row), len(keys), dtype=torch.bool)
        mask = mask.tril(len(keys) - len(row)) if given["is_causal"] else mask
        heads = [x.transpose(0, 1)[None] for x in (row, keys, values)]
        attend = torch.nn.functional.scaled_dot_product_attention
        outs.append(attend(*heads, mask, enable_gqa=True, scale=given["softmax_scale"])[0].transpose(0, 1))
    out = torch.stack(outs) if starts is None else torch.cat(outs)
    return [out, torch.empty(0)]


def test_check_times_flash_attention_3_of_vllms_wheel(
    tmp_path: Path, functions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record(tmp_path, 30.0)  # too short for flex attention
    monkeypatch.setitem(sys.modules, "flash_attn_interface", functions)
    attention_peers.measure(
        record.results, make_device_context(), HeadShape(4, 2, 16), (("1x1k", 1, 128),), (("4k", 32),), {}, 1
    )
    found = record.findings()
    assert {found[f"peer.fa3.{name}"].unit for name in ("decode.1x1k", "prefill.4k")} == {"TB/s", "TFLOP/s"}


def test_flash_attention_3_of_vllms_wheel_takes_rows_in_pages(functions: ModuleType) -> None:
    """Paged, in both forms, and contiguous: the last token's output is the same."""
    q, k, v = (torch.randn(1, 32, heads, 16) for heads in (4, 2, 2))
    whole = functions.flash_attn_func(q, k, v, causal=True)
    pages = [x[0].view(2, 16, 2, 16) for x in (k, v)]
    table, length = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([32], dtype=torch.int32)
    last = functions.flash_attn_with_kvcache(q[:, -1:], *pages, cache_seqlens=length, page_table=table, causal=True)
    torch.testing.assert_close(last[0, 0], whole[0, -1])
    starts = torch.tensor([0, 32], dtype=torch.int32)
    varlen = functions.flash_attn_varlen_func(
        q[0], *pages, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=32, max_seqlen_k=32, causal=True,
        block_table=table, window_size=(-1, -1),
    )  # fmt: skip
    torch.testing.assert_close(varlen, whole[0])
    with pytest.raises(TypeError, match="softcap: not supported by this wrapper"):
        functions.flash_attn_with_kvcache(q, *pages, softcap=1.0)


def test_package_that_cannot_be_imported_is_named(
    tmp_path: Path, sources: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (sources[1] / "nanovllm" / "llm.py").write_text("import no_such_engine\n")
    assert main(["--out", str(tmp_path / "peers.tar.xz"), str(sources[1])]) == 1
    assert "nanovllm cannot be imported here: ModuleNotFoundError: No module named 'no_such_engine'" in (
        capsys.readouterr().out
    )


def test_inputs_that_are_no_packages_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.whl").write_bytes(b"no archive")
    with zipfile.ZipFile(tmp_path / "climbing.whl", "w") as archive:
        archive.writestr("../outside.py", "")
    for name, message in (
        ("empty", "has no package"),
        ("broken.whl", "is not a wheel"),
        ("climbing.whl", "has a file outside of itself: ../outside.py"),
        ("absent", "is neither a wheel nor a directory"),
    ):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / "x.tar.xz"), str(tmp_path / name)])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.tar.xz").exists()
