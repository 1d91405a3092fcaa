"""The options of a request's choices: when the text ends, and which values are reported with it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules
from penstock.frontend.generation.answer_rules.requested_grammar import grammar_field
from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.decoding import AnsweredBody


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of all choices of one request."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own stop tokens, which are reported. The model's end tokens end the text too, unreported."""
    includes_stop: bool = False
    """The stop string or stop token is part of the text."""
    min_tokens: int = 0
    """Stop strings are looked for only in the text after this many tokens."""
    skips_special_tokens: bool = True
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that are never skipped, because the parser needs them."""
    returns_token_ids: bool = False
    returns_logprobs: bool = False
    names_logprob_tokens: bool = False
    """Log probabilities are reported for the tokens that the request names, and before them for the generated one."""
    names_tokens_by_id: bool = False
    """Log probabilities of the answer, and of an echoed prompt, name tokens by id."""
    returns_prompt_logprobs: bool = False
    echoes_prompt: bool = False
    """The text begins with the prompt."""
    ranks_choices: bool = False
    """The best choices are selected by the log probabilities of their tokens."""
    grammar_field: str | None = None
    """The body's field that asks for a grammar, for error messages."""
    prompt_only: bool = False
    """Only the prompt is returned. The backend generates one token all the same; it is dropped."""
    shape: AnswerShape | None = None
    """How the text is parsed; None: all of it is the answer's text."""

    @property
    def reports_end_token(self) -> bool:
        """Whether log probabilities include the end token, although the text does not.

        Token ids identify it, and clients that score an echoed prompt expect an entry for each token.
        """
        return self.returns_logprobs and (self.returns_token_ids or self.echoes_prompt)

    @property
    def is_text_only(self) -> bool:
        """Whether a choice is only text, and none of its tokens can end it here."""
        scores_tokens = self.returns_token_ids or self.returns_logprobs or self.ranks_choices
        changes_text = self.stop_strings or self.echoes_prompt or self.prompt_only or self.shape
        return not (scores_tokens or changes_text)


def read_output_options(body: AnsweredBody, rules: AnswerRules) -> OutputOptions:
    return OutputOptions(
        stop_strings=body.stop_strings(),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        includes_stop=body.include_stop_str_in_output is True,
        min_tokens=body.min_tokens or 0,
        skips_special_tokens=body.skip_special_tokens is not False,
        kept_token_ids=rules.kept_token_ids,
        returns_token_ids=body.return_token_ids is True,
        returns_logprobs=body.num_logprobs >= 0,
        names_logprob_tokens=bool(body.logprob_token_ids),
        names_tokens_by_id=body.return_tokens_as_token_ids is True,
        returns_prompt_logprobs=body.prompt_logprobs is not None,
        echoes_prompt=isinstance(body, CompletionBody) and body.echo is True,
        ranks_choices=body.ranks_candidates,
        grammar_field=None if rules.grammar is None else grammar_field(body) or "tools",
        prompt_only=body.is_prompt_only,
        shape=rules.shape,
    )
