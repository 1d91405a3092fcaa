"""GBNF becomes Lark that matches the same texts; llguidance, which the backend uses, is the judge."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.frontend.generation.answer_rules.gbnf import is_gbnf, to_lark
from penstock.frontend.transport.errors import ApiError
from tests.frontend.harness import END_TOKEN, TOKENIZER, VOCAB_SIZE

# llama.cpp's grammars/json.gbnf
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB_SIZE, eos_token=[END_TOKEN])


def matches(tokenizer: LLTokenizer, gbnf: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(to_lark("grammar", gbnf)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["yesno", "", "maybe"]),
        ('root ::= item+\nitem ::= "- " [^\\n]+ "\\n"', ["- a\n", "- a\n- b c\n"], ["- \n", "a\n"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        ('root ::= [a-c]{2,3} # a comment\n', ["ab", "abc"], ["a", "abcd", "ad"]),
        ('root ::= ("a"\n | "b")* "é"', ["é", "abé"], ["ab"]),
        ('root ::= "caf\\u00e9" [\\xe0-\\xff]', ["caféè"], ["cafée"]),
        ('root ::= "\\U0001F600" "\\x41"', ["😀A"], ["😀B"]),
        ('root ::= my-rule_2 "/" Other\nmy-rule_2 ::= "a"\nOther ::= "b"?', ["a/", "a/b"], ["ab"]),
        (JSON, ['{"a": [1, -2.5e3, "x\\u00e9\\n"], "b": {}}', "{}"], ["[1]", '{"a": }', '{"a": 01}']),
    ],
)  # fmt: skip
def test_grammar_matches_the_same_texts(tokenizer: LLTokenizer, gbnf: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(gbnf)
    for text in good:
        assert matches(tokenizer, gbnf, text), text
    for text in bad:
        assert not matches(tokenizer, gbnf, text), text


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("root", "Expected ::="),
        ('a ::= "b"', "No 'root' rule"),
        ("root ::= missing", "'missing' not found"),
        ('root ::= "a', "Unexpected end of input"),
        ('root ::= "\\', "ends within an escape"),
        ('root ::= "\\u12"', "Invalid \\u escape"),
        ("root ::= " + "(" * 3000, "nested too deeply"),
        ('root ::= "a"{' + "9" * 5000 + "}", "not a grammar in GBNF"),
    ],
)
def test_text_that_is_no_grammar_is_refused_by_its_field(gbnf: str, reason: str) -> None:
    with pytest.raises(ApiError) as refused:
        to_lark("ebnf", gbnf)
    assert refused.value.param == "ebnf"
    assert reason in refused.value.message
    assert len(refused.value.message) < 300


def test_lark_with_its_mark_stays_as_it_is() -> None:
    lark = '%llguidance {}\nstart: "::="'
    assert not is_gbnf(lark)
    assert to_lark("grammar", lark) == lark
