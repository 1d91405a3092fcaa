"""`penstock bench embeddings`: its inputs, its libraries and its random model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from penstock.tools.bench.encoders.inputs import InputLength, draw_batches
from penstock.tools.bench.encoders.library_peer import penstock_encoder
from penstock.tools.bench.encoders.library_process import Library, library_process
from penstock.tools.bench.errors import BenchError
from penstock.tools.random_model import ModelDims, write_random_model

TINY = ModelDims(
    architecture="bert", hidden_size=32, layers=1, heads=2, intermediate_size=64, vocab_size=2048, max_context=64
)
FAKE_LIBRARY = """#!{python}
import json, sys
print(json.dumps({{"name": "fake " + sys.argv[3]}}), flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    if "fail" in texts:
        sys.exit("no vectors")
    print(json.dumps({{"seconds": float(len(texts))}}), flush=True)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bert")
    write_random_model(out, TINY)
    return out


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(FAKE_LIBRARY.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_inputs_have_exactly_the_tokens_that_they_claim(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    batches = draw_batches(InputLength("mix"), 4, 8, seed=1)
    for batch in batches:
        assert sum(len(tokenizer.encode(text).ids) for text in batch.texts) == batch.num_tokens
    assert all(tokenizer.token_to_id("[UNK]") not in tokenizer.encode(text).ids for text in batches[0].texts)


@pytest.mark.parametrize("text", ["", "2", "long", "-5", "70000"])
def test_a_length_that_no_input_has_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is not a length of inputs"):
        InputLength.parse(text)


@pytest.mark.parametrize(
    "text", ["", "onnxruntime=python", "onnxruntime,fp16=python", "numpy,fp32=python", "onnxruntime,fp32="]
)
def test_a_library_with_a_missing_part_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="is not LIBRARY,DTYPE=PYTHON"):
        Library.parse(text)


def test_a_library_is_timed_in_its_own_process(fake_python: str, tmp_path: Path) -> None:
    library = Library.parse(f"onnxruntime,fp32={fake_python}")
    with library_process(library, tmp_path) as process:
        assert process.name == f"fake {tmp_path}"
        with process.running():
            assert process.encode(["a", "b"]) == 2.0
    assert process.process.poll() is not None


def test_our_pass_alone_gives_the_vectors_of_transformers(model_dir: Path) -> None:
    texts = [text for batch in draw_batches(InputLength("16"), 2, 2, seed=1) for text in batch.texts]
    name, encode = penstock_encoder(str(model_dir), "fp32")
    assert name == "penstock's pass alone, fp32"
    model = transformers.AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    with torch.inference_mode():
        states = model(torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])).last_hidden_state
    expected = torch.nn.functional.normalize(states.mean(1))
    torch.testing.assert_close(torch.from_numpy(encode(texts)), expected, atol=2e-6, rtol=1e-4)


def test_a_library_that_ends_is_reported_with_its_last_lines(fake_python: str, tmp_path: Path) -> None:
    library = Library.parse(f"onnxruntime,fp32={fake_python}")
    with (
        pytest.raises(BenchError, match="ended\nno vectors"),
        library_process(library, tmp_path) as process,
        process.running(),
    ):
        process.encode(["fail"])


def test_an_interpreter_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    library = Library.parse(f"onnxruntime,fp32={tmp_path / 'python'}")
    with pytest.raises(BenchError, match="cannot be started"), library_process(library, tmp_path):
        pass
