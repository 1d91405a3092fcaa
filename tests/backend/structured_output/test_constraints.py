"""Constraints of a sequence, with the demo model's tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, wait
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from penstock.backend.structured_output.compile_grammar import CompiledGrammar, compile_grammar, load_tokenizer
from penstock.backend.structured_output.constraints import ConstraintFailed, SequenceConstraints, forced_tokens
from penstock.backend.structured_output.grammar_cache import GrammarCache, _copy_of
from penstock.backend.structured_output.grammar_costs import BadGrammar
from penstock.backend.structured_output.late_masks import MaskedRow, fill_masks
from penstock.shm.messages import Constraints, Grammar
from tests.backend.structured_output.constrained import EOS, TOKENIZER, TOKENIZER_JSON, new_compiler, tokens_of

VOCAB_SIZE = TOKENIZER.get_vocab_size() + 50  # models pad their vocabulary
STOPS = frozenset([EOS])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCache]:
    compiler = new_compiler(VOCAB_SIZE)
    yield compiler
    compiler.close()


def compile_now(compiler: GrammarCache, grammar: Grammar) -> CompiledGrammar:
    future = compiler.compile(grammar)
    wait([future], timeout=30)
    return compiler.take_result(grammar, future)


def constrained(compiler: GrammarCache, **fields: object) -> SequenceConstraints:
    constraints = Constraints(**fields)  # type: ignore[arg-type]
    grammar = None
    if constraints.grammar is not None:
        grammar = compiler.find_compiled(constraints.grammar)
        if grammar is None:
            grammar = compile_now(compiler, constraints.grammar)
    return SequenceConstraints(constraints, grammar, STOPS, VOCAB_SIZE)


def allowed(constraints: SequenceConstraints) -> set[int]:
    row = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    constraints.fill_mask(row)
    ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    assert ids
    assert max(ids) < VOCAB_SIZE
    return set(ids)


def walk(constraints: SequenceConstraints, rng: random.Random, most: int = 300) -> list[int]:
    """Random allowed tokens until the text may end."""
    tokens: list[int] = []
    while len(tokens) < most:
        choices = sorted(allowed(constraints))
        token = EOS if EOS in choices else rng.choice(choices)
        constraints.advance(token)
        if token == EOS:
            return tokens
        tokens.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("seed", range(5))
def test_sampled_text_matches_the_schema(compiler: GrammarCache, seed: int) -> None:
    constraints = constrained(compiler, grammar=Grammar("json_schema", json.dumps(PERSON)))
    text = TOKENIZER.decode(walk(constraints, random.Random(seed)))
    jsonschema.validate(json.loads(text), PERSON)


def test_regex_and_lark_grammars_are_followed(compiler: GrammarCache) -> None:
    regex = constrained(compiler, grammar=Grammar("regex", "[ab]{3}"))
    assert set(TOKENIZER.decode(walk(regex, random.Random(1)))) <= set("ab")
    lark = constrained(compiler, grammar=Grammar("lark", 'start: "yes" | "no"'))
    assert TOKENIZER.decode(walk(lark, random.Random(2))) in ("yes", "no")


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        (Grammar("regex", r"[a-z]{2,9}(_[a-z]+)*: [^\n]{1,40}"), "some_names: and then It's 42 times"),
        (Grammar("lark", 'start: NAME (" = " NAME)*\nNAME: /[a-z_]+/'), "this = that = more_of_it"),
    ],
)
def test_token_slices_give_the_same_masks_as_single_tokens(
    compiler: GrammarCache, grammar: Grammar, answer: str
) -> None:
    plain = LLTokenizer(TOKENIZER_JSON.read_text(encoding="utf-8"), n_vocab=VOCAB_SIZE, eos_token=[EOS], slices=[])
    compile_from = {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}[grammar.kind]
    oracle = LLMatcher(plain, compile_from(grammar.text))
    constraints = constrained(compiler, grammar=grammar)
    for token in plain.tokenize_str(answer):
        bits = np.frombuffer(oracle.compute_bitmask(), np.uint8)
        expected = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        assert allowed(constraints) == set(expected)
        constraints.advance(token)
        assert oracle.consume_token(token)


@settings(max_examples=25)
@given(st.integers(0, 1000), st.lists(st.integers(0, 6), max_size=4))
def test_rewind_restores_earlier_masks(compiler: GrammarCache, seed: int, rewinds: list[int]) -> None:
    rng = random.Random(seed)
    opening = tuple(tokens_of("so:"))
    fields = {"grammar": Grammar("regex", "[a-f]{4,9}"), "grammar_after": opening, "thinking_end": opening}
    constraints = constrained(compiler, thinking_budget_tokens=3, **fields)
    tokens: list[int] = []
    masks = [allowed(constraints)]
    for rewind in [*rewinds, 0]:
        while len(tokens) < 8 and masks[-1] != {EOS}:
            token = rng.choice(sorted(masks[-1] - {EOS}) or [EOS])
            constraints.advance(token)
            tokens.append(token)
            masks.append(allowed(constraints))
        kept = max(0, len(tokens) - rewind)
        constraints.rewind(kept)
        del tokens[kept:], masks[kept + 1 :]
        assert constraints.num_tokens == kept
        assert allowed(constraints) == masks[-1]


def test_grammar_begins_after_the_reasoning(compiler: GrammarCache) -> None:
    end = tuple(tokens_of("so:"))
    constraints = constrained(compiler, grammar=Grammar("regex", "[0-9]+"), grammar_after=end)
    assert allowed(constraints) == set(range(VOCAB_SIZE)) - STOPS  # the answer may not end before its grammar begins
    for token in end:
        constraints.advance(token)
    assert all(TOKENIZER.decode([token]).strip().isdigit() for token in allowed(constraints))


def test_end_of_reasoning_is_forced_when_its_budget_is_spent(compiler: GrammarCache) -> None:
    end = tuple(tokens_of("so:"))
    constraints = constrained(compiler, thinking_budget_tokens=2, thinking_end=end)
    for token in (5, 6):
        assert len(allowed(constraints)) == VOCAB_SIZE
        constraints.advance(token)
    for token in end:
        assert allowed(constraints) == {token}
        constraints.advance(token)
    assert len(allowed(constraints)) == VOCAB_SIZE


def test_reasoning_that_ends_in_time_is_not_constrained(compiler: GrammarCache) -> None:
    constraints = constrained(compiler, thinking_budget_tokens=2, thinking_end=(7,))
    for token in (7, 8, 9):
        constraints.advance(token)
        assert len(allowed(constraints)) == VOCAB_SIZE


def test_token_lists_restrict_the_mask(compiler: GrammarCache) -> None:
    constraints = constrained(compiler, allowed_token_ids=(EOS, 10, 11, 12), bad_words=((10,), (11, 12)), min_tokens=2)
    assert allowed(constraints) == {11, 12}
    constraints.advance(11)
    assert allowed(constraints) == {11}
    constraints.advance(11)
    assert allowed(constraints) == {EOS, 11}


def test_min_tokens_and_bad_words_yield_when_they_would_leave_no_token(compiler: GrammarCache) -> None:
    constraints = constrained(compiler, grammar=Grammar("regex", "a"), min_tokens=50)
    constraints.advance(tokens_of("a")[0])
    assert allowed(constraints) == {EOS}
    assert allowed(constrained(compiler, allowed_token_ids=(9,), bad_words=((9,),))) == {9}


def test_contradictory_constraints_fail(compiler: GrammarCache) -> None:
    constraints = constrained(
        compiler,
        grammar=Grammar("regex", "[0-9]"),
        allowed_token_ids=tuple(tokens_of("x")),
    )
    with pytest.raises(ConstraintFailed, match="allow no token"):
        allowed(constraints)


def test_grammar_error_mid_answer_is_one_short_line() -> None:
    matcher = Mock(**{"consume_token.return_value": False, "get_error.return_value": "a client's own text\n" * 1000})
    grammar = CompiledGrammar(matcher, EOS)
    constraints = SequenceConstraints(Constraints(grammar=Grammar("regex", "a")), grammar, STOPS, VOCAB_SIZE)
    constraints.advance(1)
    with pytest.raises(ConstraintFailed) as failure:
        allowed(constraints)
    assert "\n" not in str(failure.value)
    assert len(str(failure.value)) <= 300


Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize("call", ["consume_token", "rollback", "unsafe_compute_mask_ptr", "is_accepting", "deep_copy"])
@pytest.mark.parametrize("raised", [Panic("index 7\nis out of bounds"), KeyboardInterrupt("x")], ids=["panic", "other"])
def test_panic_of_the_grammar_library_fails_one_sequence_and_other_exceptions_are_passed_on(
    call: str, raised: BaseException
) -> None:
    grammar = CompiledGrammar(Mock(**{"is_error.return_value": False, f"{call}.side_effect": raised}), EOS)
    requested = Constraints(grammar=Grammar("regex", "a"), grammar_ends=(1,))

    def use() -> None:
        copied = _copy_of(grammar) if call == "deep_copy" else grammar
        constraints = SequenceConstraints(requested, copied, STOPS, VOCAB_SIZE)
        constraints.advance(1)
        constraints.rewind(0)
        allowed(constraints)

    with pytest.raises((ConstraintFailed, BadGrammar, KeyboardInterrupt)) as failure:
        use()
    assert isinstance(failure.value, KeyboardInterrupt) is isinstance(raised, KeyboardInterrupt)
    assert ("index 7 is out of bounds" in str(failure.value)) is isinstance(raised, Panic)


def test_guess_is_the_text_that_the_grammar_forces_and_stops_in_free_text() -> None:
    tokenizer = load_tokenizer(TOKENIZER_JSON, VOCAB_SIZE, (EOS,))
    matcher = compile_grammar(tokenizer, Grammar("json_schema", json.dumps(PERSON)))
    guesses, tokens = [], list[int]()
    for part in ('{\n "', 'name": "', "Bo, a: ", "b", '",', '\n "age": '):
        added = tokenizer.tokenize_str(part)
        assert matcher.consume_tokens(added)
        tokens += added
        guesses.append(tokenizer.decode_str(forced_tokens(matcher, tokenizer, tokens)))
    assert guesses == ['name": "', "", "", "", '\n "age":', ""]


def test_drafts_get_no_masks_and_a_grammar_no_guesses_if_the_library_cannot_copy() -> None:
    matcher = Mock(**{"is_error.return_value": False, "deep_copy.side_effect": Panic("no")})
    grammar = CompiledGrammar(matcher, EOS, tokenizer=load_tokenizer(TOKENIZER_JSON, VOCAB_SIZE, (EOS,)))
    requested = Constraints(grammar=Grammar("regex", "a"), grammar_ends=(1,))
    constraints = SequenceConstraints(requested, grammar, STOPS, VOCAB_SIZE)
    masks, faults, _ = fill_masks([MaskedRow(0, 0, constraints, [0, 1], drafts=[1])], VOCAB_SIZE)
    assert masks is not None
    assert (masks.rows.tolist(), faults) == ([0], {})
    constraints.advance(1)
    for _ in range(2):  # the second time nothing is tried
        constraints.wants_guess = True
        constraints.make_guess()
    assert (constraints.guess, matcher.deep_copy.call_count) == ((0, []), 2)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
        (Grammar("json_schema", "[1"), "not a JSON object"),
        (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 1}'), "minLength"),
        (Grammar("json_schema", '{"$ref": "#"}'), r"the \$ref at # goes round in a circle: #"),
        (
            Grammar("json_schema", '{"items": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"$ref": "#/items"}}}'),
            r"the \$ref at #/(items|\$defs/a/b) goes round in a circle: #/.* → #/",
        ),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("lark", "start: foo"), "foo"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_grammar_is_refused_in_one_line(compiler: GrammarCache, grammar: Grammar, reason: str) -> None:
    with pytest.raises(BadGrammar, match=reason) as refusal:
        compile_now(compiler, grammar)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 300
    with pytest.raises(BadGrammar, match=reason):
        compiler.find_compiled(grammar)


def test_equal_grammars_are_compiled_once(compiler: GrammarCache) -> None:
    grammar = Grammar("regex", "[xyz]{2}")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    assert first is second
    wait([first], timeout=30)
    one, other = compiler.take_result(grammar, first), compiler.take_result(grammar, second)
    assert one is not other
    assert compiler.find_compiled(grammar) is not None


def test_compiler_cache_is_bounded_and_evicts_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.structured_output.grammar_cache._CACHE_BYTES", 210 << 10)
    pool = Mock()
    compiler = GrammarCache(pool)

    def settle(grammar: Grammar) -> None:
        pool.submit.return_value = future = Future[CompiledGrammar]()
        compiler.compile(grammar)
        future.set_result(CompiledGrammar(Mock(), EOS, num_bytes=100 << 10))
        compiler.take_result(grammar, future)

    grammars = [Grammar("regex", letter * 4) for letter in "abc"]
    for grammar in grammars[:2]:
        settle(grammar)
    assert compiler.find_compiled(grammars[0]) is not None
    settle(grammars[2])
    assert [compiler.find_compiled(grammar) is not None for grammar in grammars] == [True, False, True]


HUNGRY = Grammar("regex", r"(.|\n)*[aeioust ](.|\n){60}x")
"""Its lexer makes a new state for nearly every text: 31 MB for 50 tokens."""


def use(constraints: SequenceConstraints, num_tokens: int, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(num_tokens):
        constraints.advance(rng.choice(sorted(allowed(constraints) - STOPS)))


def test_grammar_that_grows_in_use_leaves_the_cache(compiler: GrammarCache) -> None:
    grammar = Grammar("regex", HUNGRY.text + "y")
    use(constrained(compiler, grammar=grammar), 25)
    assert compiler.find_compiled(grammar) is None
    assert compile_now(compiler, grammar).growth.num_bytes == 0


def test_stream_that_meets_the_limit_of_states_does_not_fail_those_that_begin_later(compiler: GrammarCache) -> None:
    with pytest.raises(ConstraintFailed, match=r": lexer error: too many states: [\d >=]+$"):
        use(constrained(compiler, grammar=HUNGRY), 100)
    assert compiler.find_compiled(HUNGRY) is None
    use(constrained(compiler, grammar=HUNGRY), 3)


def test_grammar_that_is_used_again_and_again_stays_cached(
    compiler: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks whose states are known take time but no memory."""
    for name in ("_READ_AFTER_NS", "_NUM_READING_TIMES"):
        monkeypatch.setattr(f"penstock.backend.structured_output.grammar_costs.{name}", 0)
    grammar = Grammar("json_schema", json.dumps(PERSON))
    growths = []
    for _ in range(3):
        constraints = constrained(compiler, grammar=grammar)
        walk(constraints, random.Random(5))
        found = compiler.find_compiled(grammar)
        assert found is not None
        growths.append(found.growth.num_bytes)
    assert 0 < growths[0] < 1 << 20
    assert growths[1] == growths[2]


def test_growth_counts_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backend.structured_output.grammar_cache._CACHE_BYTES", 64 << 20)
    pool = Mock()
    compiler = GrammarCache(pool)
    grammars = [Grammar("regex", "a" * (1 + index)) for index in range(12)]
    compiled = {}
    for grammar in grammars:
        pool.submit.return_value = future = Future[CompiledGrammar]()
        compiler.compile(grammar)
        future.set_result(CompiledGrammar(Mock(), EOS))
        compiled[grammar] = compiler.take_result(grammar, future)
    for grammar in grammars:
        compiled[grammar].growth.num_bytes = 7 << 20
    assert [compiler.find_compiled(grammar) is not None for grammar in grammars] == [False] * 3 + [True] * 9
    compiled[grammars[11]].growth.num_bytes = 9 << 20
    assert compiler.find_compiled(grammars[11]) is None
    assert compiler.find_compiled(grammars[10]) is not None


def test_stop_tokens_are_masked_until_the_grammar_may_end_unless_no_other_is_left(compiler: GrammarCache) -> None:
    (a,), (b,), (c,) = map(tokens_of, "abc")
    compiled = compile_now(compiler, Grammar("regex", "[ab]c?[ab]*"))
    constraints = SequenceConstraints(
        Constraints(grammar=Grammar("regex", "[ab]c?[ab]*")), compiled, STOPS | {a, c}, VOCAB_SIZE
    )
    first = allowed(constraints)
    assert b in first
    assert a not in first
    constraints.advance(b)
    assert allowed(constraints) >= {EOS, a, b, c}
    only = compile_now(compiler, Grammar("regex", "c"))
    constraints = SequenceConstraints(Constraints(grammar=Grammar("regex", "c")), only, STOPS | {c}, VOCAB_SIZE)
    assert allowed(constraints) == {c}


def test_end_that_only_the_frontend_knows_ends_the_text_where_the_grammar_may_end(compiler: GrammarCache) -> None:
    end = EOS + 1
    constraints = constrained(compiler, grammar=Grammar("regex", "ab?"), grammar_ends=(end, VOCAB_SIZE + 7))
    assert not allowed(constraints) & {EOS, end}
    constraints.advance(*tokens_of("a"))
    assert allowed(constraints) >= {EOS, end, *tokens_of("b")}
    constraints.advance(end)
    assert allowed(constraints) == {EOS, end}
    constraints.rewind(1)
    constraints.advance(*tokens_of("b"))
    assert allowed(constraints) == {EOS, end}
