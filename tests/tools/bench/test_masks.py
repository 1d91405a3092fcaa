"""What the figures of masks and of workers are held against, and the tokenizer that is made for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from penstock.backend.main import DEMO_MODEL_DIR
from penstock.tools.bench.components.mask_cost import BenchVocabulary, MaskCost, RowCost, mask_aims, measure_masks
from penstock.tools.bench.components.synthetic_tokenizer import END, write_tokenizer
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.serving.workers_scaling import MIN_CORES, Scaling, WorkersRun, scaling_aims
from penstock.tools.main import app

VOCAB_SIZE = 3000
TEXT = 'plain words, "quoted" – und Größe, 水 и слова\n\t12345'


def test_a_made_up_tokenizer_has_so_many_tokens_and_spells_every_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    end_id = write_tokenizer(path, VOCAB_SIZE, seed=1)
    tokenizer = Tokenizer.from_file(str(path))
    assert (end_id, tokenizer.get_vocab_size(), tokenizer.token_to_id(END)) == (VOCAB_SIZE - 1, VOCAB_SIZE, end_id)
    grammars_own = LLTokenizer(path.read_text(), n_vocab=VOCAB_SIZE, eos_token=[end_id])
    tokens = grammars_own.greedy_tokenize(TEXT)
    assert len(tokens) < len(TEXT.encode())
    assert tokenizer.decode(tokens) == TEXT


def test_the_same_seed_makes_the_same_tokenizer(tmp_path: Path) -> None:
    first, again, other = (tmp_path / name for name in "abc")
    for path, seed in ((first, 1), (again, 1), (other, 2)):
        write_tokenizer(path, VOCAB_SIZE, seed)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_the_dearest_grammar_of_a_vocabulary_is_held_against_the_aim_with_its_application() -> None:
    def cost(vocab_size: int, cold_us: float, warm_us: float, applied_us: float) -> MaskCost:
        first, cold, warm, advance, applied = (RowCost(us, us, us) for us in (1, cold_us, warm_us, 1, applied_us))
        return MaskCost(vocab_size, "regex", 1, 1.0, first, cold, warm, advance, applied)

    aims = mask_aims([cost(10, 30, 20, 5), cost(10, 25, 21, 9), cost(99, 95, 40, 10)])
    assert [(aim.value, aim.reached) for aim in aims] == [(35, True), (30, True), (105, False), (50, True)]
    assert "10 tokens, cold" in aims[0].name
    assert "99 tokens, warm" in aims[3].name


def test_grammars_that_a_vocabulary_cannot_answer_are_told(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, VOCAB_SIZE, seed=1)
    path.write_bytes(path.read_bytes().replace(b'"{":', b'"}}}}":'))
    with pytest.raises(BenchError, match="of the benchmark"):
        measure_masks(BenchVocabulary(path, VOCAB_SIZE, (VOCAB_SIZE - 1,)), 1, 0)


def test_a_model_without_a_tokenizer_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEMO_MODEL_DIR / "config.json", tmp_path)
    with pytest.raises(SystemExit) as exited:
        app(["bench", "mask-cost", "--forward-pass", "fake", "--model", str(tmp_path)])
    assert exited.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock bench")]
    assert f"{tmp_path} has no tokenizer.json" in line


def test_workers_are_held_against_the_aim_only_where_there_are_cores_for_them() -> None:
    def run(workers: int, duration_s: float, cpu_s: float) -> WorkersRun:
        return WorkersRun(workers, duration_s, 1000, 500, [0.0, cpu_s], 1.0, 1.0)

    one = [run(1, 2.0, 2.0), run(1, 2.0, 2.0), run(1, 2.0, 2.0)]
    two = [run(2, 1.0, 4.0), run(2, 1.6, 2.0), run(2, 1.25, 2.5)]
    scaling = Scaling.of("streams", one, two)
    assert (scaling.tokens_per_s_ratio, scaling.tokens_per_cpu_s_ratio) == (1.6, 0.8)
    assert scaling_aims([scaling], MIN_CORES - 1) == []
    (aim,) = scaling_aims([scaling], MIN_CORES)
    assert (aim.value, aim.limit, aim.reached) == (1.6, 1.8, False)
