"""GGUF files that are damaged, hostile or not supported: one line, and nothing large is allocated."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.backend.checkpoint.config.decoder_config import TensorNames
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.gguf import cached_directories
from penstock.backend.checkpoint.gguf.directory import gguf_directory
from penstock.backend.checkpoint.gguf.header import read_header
from penstock.backend.checkpoint.gguf.names import GgufNames
from penstock.backend.checkpoint.hub import resolve_model
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.gguf.writer import GgufFile, byte_level_vocabulary, from_model
from tests.checkpoints import make_model

F32 = gguf.GGMLQuantizationType.F32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_directories, "cache_directory", lambda: tmp_path / "cache")


@pytest.fixture
def file() -> GgufFile:
    model = make_model("llama2", num_hidden_layers=1, vocab_size=320)
    return from_model("llama", model, lambda _: "Q8_0", byte_level_vocabulary(320))


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(tensors: bytes = b"", keys: bytes = b"", num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = (1 << 63) + 1
HOSTILE = {
    "no magic": (b"GGML" + bytes(60), "is not a GGUF file"),
    "empty": (b"", "the magic' needs 4 bytes at byte 0, and 0 are left"),
    "version": (header(version=4), "GGUF version 4; supported are 2 and 3"),
    "other byte order": (header(version=3 << 24), "GGUF version 50331648"),
    "tensors": (header(num_tensors=HUGE), "has 9223372036854775809 tensors; the file has room for 0"),
    "keys": (header(num_keys=HUGE), "has 9223372036854775809 metadata keys; the file has room for 0"),
    "key": (header(keys=struct.pack("<Q", HUGE) + bytes(60), num_keys=1), "has 9223372036854775809 bytes; at most 512"),
    "string": (
        header(keys=string(b"k") + struct.pack("<IQ", 8, HUGE) + bytes(60), num_keys=1),
        "'k' has 9223372036854775809 bytes",
    ),
    "array": (
        header(keys=string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 62) + bytes(60), num_keys=1),
        "'k' is an array of 4611686018427387904 items",
    ),
    "array of strings": (
        header(keys=string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 21) + bytes(60), num_keys=1),
        "'k' is an array of 2097152 items",
    ),
    "array of arrays": (
        header(keys=string(b"k") + struct.pack("<IIQ", 9, 9, 1), num_keys=1),
        "'k' has a value of type 9;",
    ),
    "type of value": (header(keys=string(b"k") + struct.pack("<IQ", 99, 1), num_keys=1), "'k' has a value of type 99"),
    "key twice": (
        header(keys=2 * (string(b"k") + struct.pack("<II", 4, 1)), num_keys=2),
        "the metadata key 'k' occurs twice",
    ),
    "dimensions": (
        header(string(b"t") + struct.pack("<I", 1 << 31) + bytes(60), num_tensors=1),
        "2147483648 dimensions",
    ),
    "size": (header(tensor(b"t", (1 << 40, 1 << 40)), num_tensors=1), "their product must be from 1 to 2\\^48"),
    "no size": (header(tensor(b"t", (0,)), num_tensors=1), r"dimensions \[0\]; their product"),
    "beyond the file": (
        header(tensor(b"t", (1 << 30,)), num_tensors=1),
        "ends at byte 4294967360; the file has 57",
    ),
    "offset": (header(tensor(b"t", (8,), offset=1 << 62), num_tensors=1), "'t' ends at byte 46116860"),
    "odd offset": (
        header(tensor(b"t", (8,), offset=4), num_tensors=1),
        "offset 4, not a multiple of the alignment",
    ),
    "type": (
        header(tensor(b"t", (256,), kind=9), num_tensors=1),
        "'t' has type Q8_1; supported are F32, F16, BF16",
    ),
    "unknown type": (header(tensor(b"t", (256,), kind=77), num_tensors=1), "'t' has type number 77; supported"),
    "part of a block": (header(tensor(b"t", (48,), kind=8), num_tensors=1), "rows of 48 numbers, not a multiple of 32"),
    "name twice": (header(2 * tensor(b"t", (1,)), num_tensors=2), "the tensor 't' occurs twice"),
    "overlap": (
        header(tensor(b"a", (16,)) + tensor(b"b", (16,), offset=32), num_tensors=2) + bytes(200),
        "tensor b begins at byte 128, within a, which ends at 160",
    ),
    "alignment": (
        header(keys=string(b"general.alignment") + struct.pack("<II", 4, 3), num_keys=1),
        "general.alignment is 3; it must be a power of two",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_in_one_line_without_memory(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(StartupError, match=message) as error:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture is 'mamba'; GGUF files are supported for llama",
        ),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        (
            {"llama.block_count": 2},
            r"layers\.1\.self_attn\.q_proj\.weight, expected .*is missing from .*model\.gguf",
        ),
        ({"llama.block_count": "x"}, "llama.block_count is 'x'; expected int"),
        ({"llama.embedding_length": 128}, r"embed_tokens\.weight has shape \[320, 68\]; GGUF, Q8_0 .* \[320, 136\]"),
        ({"llama.attention.head_count": 0}, "num_attention_heads is 0"),
        ({"llama.attention.head_count_kv": [2, 4]}, "expected the same integer for all layers"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta is 0.0"),
        ({"llama.rope.scaling.type": "magic"}, "rope.scaling.type is 'magic'"),
        (
            {"llama.attention.sliding_window": 16},
            "llama.attention.sliding_window is 16; this architecture is supported without it only",
        ),
        ({"llama.attention.causal": False}, "llama.attention.causal is False; this architecture"),
        ({"llama.attention.value_length": 15}, "value_length is 15; it must be that of attention.key_length, 16"),
        ({"llama.pooling_type": 4}, r"llama.pooling_type is 4; supported are 1 \(mean\)"),
        ({"split.count": 3}, "split.count is 3; the name of the file says 1"),
        ({"tokenizer.ggml.tokens": None}, "model.gguf: tokenizer.ggml.tokens is missing: the file has no tokenizer"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_by_key(
    change: dict[str, Any], message: str, file: GgufFile, tmp_path: Path
) -> None:
    arch = change.pop("general.architecture", file.arch)
    metadata = {key: value for key, value in (file.metadata | change).items() if value is not None}
    path = GgufFile(arch, metadata, file.tensors).write(tmp_path / "model.gguf")
    with pytest.raises(StartupError, match=message):
        read_all(path)


def read_all(path: Path) -> None:
    model_dir = resolve_model(str(path))
    open_weights(model_dir, read_decoder_config(model_dir)).close()


def test_truncated_file_and_missing_shard_are_refused(file: GgufFile, tmp_path: Path) -> None:
    path = file.write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(StartupError, match=r"ends at byte \d+; the file has \d+"):
        gguf_directory(path)
    path.rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(StartupError, match="m-00002-of-00002"):
        gguf_directory(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(StartupError, match="is shard 00002 of 2; give the first"):
        gguf_directory(tmp_path / "m-00002-of-00002.gguf")


def test_vector_that_is_quantised_is_refused_by_name(file: GgufFile, tmp_path: Path) -> None:
    name = "blk.0.attn_norm.weight"
    file.tensors[name] = (
        gguf.quantize(np.ones((1, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)[0],
        gguf.GGMLQuantizationType.Q8_0,
    )
    with pytest.raises(StartupError, match=r"input_layernorm\.weight has shape \[68\]; config.json makes it \[64\]"):
        read_all(file.write(tmp_path / "model.gguf"))


def test_number_of_matrices_in_a_tensor_is_limited() -> None:
    names = GgufNames.of_decoder(TensorNames())
    counts = [len(names.hf_names("altup_proj.weight", (count, 8, 8))) for count in (3, 1 << 40)]
    assert counts == [3, 0]


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight"])
def test_tensor_that_the_model_has_no_place_for_is_refused_by_name(name: str, file: GgufFile, tmp_path: Path) -> None:
    """Long contexts of Phi-3, biases, and experts would otherwise be left out of the computation."""
    file.tensors[name] = np.ones(8, np.float32), gguf.GGMLQuantizationType.F32
    with pytest.raises(StartupError, match=f"tensor '{name}' has no place in a LlamaForCausalLM"):
        gguf_directory(file.write(tmp_path / "model.gguf"))


def test_failed_start_leaves_nothing_in_the_cache(file: GgufFile, tmp_path: Path) -> None:
    del file.metadata["tokenizer.ggml.pre"]
    with pytest.raises(StartupError):
        gguf_directory(file.write(tmp_path / "model.gguf"))
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


SEED = header(
    tensor(b"token_embd.weight", (32, 4), 8) + tensor(b"output_norm.weight", (32,), 0, 160),
    string(b"general.architecture")
    + struct.pack("<I", 8)
    + string(b"llama")
    + string(b"tokenizer.ggml.tokens")
    + struct.pack("<IIQ", 9, 8, 2)
    + string(b"a")
    + string(b"b"),
    num_tensors=2,
    num_keys=2,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(SEED) - 1), st.sampled_from([0, 1, 8, 9, 127, 128, 255])), max_size=4
    ),
    padding=st.integers(0, 400),
)
def test_changed_bytes_give_a_header_within_the_file_or_a_startup_error(
    changes: list[tuple[int, int]], padding: int, tmp_path: Path
) -> None:
    content = bytearray(SEED + bytes(padding))
    for place, byte in changes:
        content[place] = byte
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    try:
        found = read_header(path)
    except StartupError:
        return
    ends = [item.stored.first_byte + item.stored.num_bytes for item in found.tensors.values()]
    assert max(ends, default=0) <= len(content)
