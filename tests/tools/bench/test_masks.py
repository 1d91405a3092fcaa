"""The aims of mask-cost, and its synthetic tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.main import app
from penstock.tools.bench.components.mask_cost import BenchVocabulary, MaskCost, RowCost, mask_aims, measure_masks
from penstock.tools.bench.components.synthetic_tokenizer import END, write_tokenizer
from penstock.tools.bench.errors import BenchError

VOCAB_SIZE = 3000
TEXT = 'plain words, "quoted" – und Größe, 水 и слова\n\t12345'


def test_synthetic_tokenizer_has_the_requested_size_and_encodes_every_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    end_id = write_tokenizer(path, VOCAB_SIZE, seed=1)
    tokenizer = Tokenizer.from_file(str(path))
    assert (end_id, tokenizer.get_vocab_size(), tokenizer.token_to_id(END)) == (VOCAB_SIZE - 1, VOCAB_SIZE, end_id)
    grammar_tokenizer = LLTokenizer(path.read_text(), n_vocab=VOCAB_SIZE, eos_token=[end_id])
    tokens = grammar_tokenizer.greedy_tokenize(TEXT)
    assert len(tokens) < len(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT


def test_same_seed_writes_the_same_tokenizer(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in "abc")
    for path, seed in ((first, 1), (again, 1), (other, 2)):
        write_tokenizer(path, VOCAB_SIZE, seed)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_aim_takes_the_slowest_grammar_of_a_vocabulary_with_its_application() -> None:
    def cost(vocab_size: int, cold_us: float, warm_us: float, applied_us: float) -> MaskCost:
        first, cold, warm, advance, applied = (RowCost(us, us, us) for us in (1, cold_us, warm_us, 1, applied_us))
        return MaskCost(vocab_size, "regex", 1, 1.0, first, cold, warm, advance, applied)

    aims = mask_aims([cost(10, 30, 20, 5), cost(10, 25, 21, 9), cost(99, 95, 40, 10)])
    assert [(aim.value, aim.reached) for aim in aims] == [(35, True), (30, True), (105, False), (50, True)]
    assert "10 tokens, cold" in aims[0].name
    assert "99 tokens, warm" in aims[3].name


def test_vocabulary_that_cannot_match_a_grammar_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, VOCAB_SIZE, seed=1)
    path.write_bytes(path.read_bytes().replace(b'"{":', b'"}}}}":'))
    with pytest.raises(BenchError, match="of the benchmark"):
        measure_masks(BenchVocabulary(path, VOCAB_SIZE, (VOCAB_SIZE - 1,)), 1, 0)


def test_model_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEMO_MODEL_DIR / "config.json", tmp_path)
    with pytest.raises(SystemExit) as exited:
        app(["bench", "mask-cost", "--forward-pass", "fake", "--model", str(tmp_path)])
    assert exited.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock bench")]
    assert f"{tmp_path} has no tokenizer.json" in line
