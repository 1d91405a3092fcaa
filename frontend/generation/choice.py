"""One of an answer's choices: the tokens of one stream become pieces of text, reasoning and tool calls."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.frontend.generation.stop_strings import StopMatcher
from penstock.frontend.parsing.deltas import ChoiceOutput, Delta, ScoredToken, joined_calls
from penstock.shm.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.frontend.text.tokenizer import ModelTokenizer
    from penstock.shm.client import LogprobEntry, TokenBatch, TokenStream

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class OutputParser(Protocol):
    """Sorts one choice's text into pieces, each of the answer, of reasoning or of a tool call. Any split of the text
    gives the same ones, joined."""

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as can be said."""
        ...

    @property
    def is_complete(self) -> bool:
        """The answer is over, whatever else the model says."""
        ...

    def push(self, text: str) -> list[Delta]: ...

    def flush(self) -> list[Delta]:
        """The text has ended: what was held back."""
        ...


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What a request wants of each of its choices."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own; the model's end the text as well, but are not told."""
    keeps_stop: bool = False
    """What ended the text is a part of it."""
    min_tokens: int = 0
    """Stop strings that are complete before so many tokens do not count."""
    skips_special_tokens: bool = True
    kept_token_ids: frozenset[int] = frozenset()
    """Special tokens that make_parser's parsers must see."""
    token_ids: bool = False
    logprobs: bool = False
    echo: bool = False
    """The prompt stands before the answer."""
    prompt_logprobs: bool = False
    ranks_choices: bool = False
    """Choices are compared by the log probabilities of their tokens."""
    grammar_field: str | None = None
    """Of the body: what asked for a grammar."""
    no_output: bool = False
    """The prompt alone is wanted; one token is generated all the same, and dropped."""
    make_parser: Callable[[], OutputParser] | None = None

    @property
    def is_plain(self) -> bool:
        """Only text, which no token of its own can end."""
        of_tokens = self.token_ids or self.logprobs or self.ranks_choices
        of_text = self.stop_strings or self.echo or self.no_output or self.make_parser
        return not (of_tokens or of_text)


class Choice:
    """Reads one stream. num_tokens counts what the model generated, up to what ended the text."""

    def __init__(
        self,
        index: int,
        prompt_index: int,
        prompt: Sequence[int],
        stream: TokenStream,
        tokenizer: ModelTokenizer,
        wanted: OutputOptions,
        prompt_text: str | None = None,
    ) -> None:
        """prompt_text is what stands for the prompt where it is echoed; None is what its tokens say."""
        self.index = index
        self.prompt_index = prompt_index
        self.prompt = prompt
        self.stream = stream
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.sum_logprob = 0.0
        """Of the tokens counted, where each comes with its log probability."""
        self.finish_reason: str | None = None
        self.stopped_by: str | int | None = None
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._prompt_text = prompt_text
        self._num_characters = 0
        """Of the text so far, before any stop string cuts it."""
        self._is_plain = wanted.is_plain
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=wanted.skips_special_tokens, kept_ids=wanted.kept_token_ids
        )
        self._stops = StopMatcher(wanted.stop_strings, keeps_match=wanted.keeps_stop)
        self._parser = wanted.make_parser() if wanted.make_parser is not None else None
        self._has_called = False
        self._is_opened = False
        self._echoed: Delta | None = None

    @property
    def reported_prompt(self) -> Sequence[int]:
        """The prompt, where its tokens are to be told."""
        return self.prompt if self._wanted.token_ids else ()

    @property
    def reports_prompt_logprobs(self) -> bool:
        """In whatever shape: there may be hundreds of thousands, all at once."""
        return self._wanted.prompt_logprobs or (self._wanted.echo and self._wanted.logprobs)

    def prepare_echo(self) -> None:
        """What stands before the answer, if anything does; before the first batch with tokens is taken. Any thread."""
        if self._wanted.echo and self._echoed is None:
            self._echoed = self._echo()

    @property
    def grammar_field(self) -> str | None:
        """Of the body: what asked for a grammar."""
        return self._wanted.grammar_field

    def take(self, batch: TokenBatch) -> Delta:
        """What has become certain by this batch. Sets finish_reason when the choice is complete."""
        if self._is_plain and batch.finish is Finish.NONE:
            self.num_tokens += len(batch.token_ids)
            return Delta(self._detokenizer.push(batch.token_ids))
        pieces = _Pieces()
        if not self._is_opened and batch.token_ids:
            self._is_opened = True
            self.prepare_echo()
            if self._echoed is not None:
                self._num_characters = len(self._echoed.text)
                pieces.deltas.append(self._echoed)
        if self._wanted.no_output:
            if batch.finish in (Finish.STOP, Finish.LENGTH):
                self.finish_reason = "length"
            return pieces.joined()
        self._take_tokens(batch, pieces)
        if self.finish_reason is None and batch.finish in (Finish.STOP, Finish.LENGTH):
            self._end(batch.finish, pieces)
        return pieces.joined()

    def finish(self, message: ChoiceOutput) -> None:
        """Adds to its whole what came in no piece."""
        message.finish_reason = self.finish_reason or "stop"
        message.stopped_by = self.stopped_by
        if self._wanted.token_ids:
            message.prompt_token_ids = list(self.prompt)
        if self._wanted.prompt_logprobs:
            message.prompt_logprobs = self.prompt_logprobs()

    def _take_tokens(self, batch: TokenBatch, pieces: _Pieces) -> None:
        """One by one, so that how they were batched changes nothing."""
        last = len(batch.token_ids) - 1
        for position, token_id in enumerate(batch.token_ids):
            self.num_tokens += 1
            told = None if batch.logprobs is None else batch.logprobs[position]
            if told is not None:
                self.sum_logprob += told.logprob
            is_text = True
            if batch.finish is Finish.STOP and position == last:
                if token_id in self._wanted.stop_token_ids:
                    self.stopped_by = token_id
                is_text = self.stopped_by is not None and self._wanted.keeps_stop
            if self._wanted.token_ids:
                pieces.token_ids.append(token_id)
            if not is_text:
                # It is told where it can be recognised.
                if told is not None and self._wanted.logprobs and self._wanted.token_ids:
                    pieces.tell(len(pieces.deltas), self._told(token_id, told, self._num_characters))
                return
            was_reasoning = self._parser is not None and self._parser.is_reasoning
            num_before, offset = len(pieces.deltas), self._num_characters
            self._add_text(self._detokenizer.push((token_id,)), pieces)
            if was_reasoning or (self._parser is not None and self._parser.is_reasoning):
                self.num_reasoning_tokens += 1
            if told is not None and self._wanted.logprobs:
                pieces.tell(num_before, self._told(token_id, told, offset))
            if self._stops.matched is not None or (self._parser is not None and self._parser.is_complete):
                self.stream.cancel()
                self._end(Finish.STOP, pieces)
                return

    def _end(self, finish: Finish, pieces: _Pieces) -> None:
        # Of no effect where a stop string has been complete.
        self._add_text(self._detokenizer.flush(), pieces)
        if self._parser is not None:
            self._add(self._parser.flush(), pieces)
        if held := self._stops.flush():
            pieces.deltas.append(Delta(held))
        if self._stops.matched is not None:
            self.stopped_by = self._stops.matched
        if finish is Finish.STOP or self.stopped_by is not None:
            self.finish_reason = "tool_calls" if self._has_called else "stop"
        else:
            self.finish_reason = "length"

    def _add_text(self, text: str, pieces: _Pieces) -> None:
        self._num_characters += len(text)
        if text:
            self._add([Delta(text)] if self._parser is None else self._parser.push(text), pieces)

    def _add(self, deltas: list[Delta], pieces: _Pieces) -> None:
        """Up to a stop string, which counts in the answer's text only: not in reasoning, not in tool calls."""
        for delta in deltas:
            if self._stops.matched is not None:
                return
            if delta.text and self.num_tokens > self._wanted.min_tokens:
                delta.text = self._stops.push(delta.text)
            self._has_called = self._has_called or bool(delta.tool_calls)
            pieces.deltas.append(delta)

    def _echo(self) -> Delta:
        text = self._prompt_text
        if text is None:
            text = self._tokenizer.decode(self.prompt, skip_special_tokens=False)
        return Delta(text, logprobs=tuple(self.prompt_logprobs(text)) if self._wanted.logprobs else ())

    def prompt_logprobs(self, text: str = "") -> list[ScoredToken]:
        """Of the prompt's tokens, the first of which has none; known when the first batch has come. text is what they
        are shown as."""
        first = self.prompt[0]
        first_text, first_raw = self._tokenizer.token_bytes.text_and_bytes(first)
        offsets = self._offsets(text)
        told = [
            self._told(token, entry, offset)
            for token, entry, offset in zip(self.prompt[1:], self.stream.prompt_logprobs, offsets[1:], strict=True)
        ]
        return [ScoredToken(first, first_text, first_raw, None), *told]

    def _offsets(self, text: str) -> list[int]:
        """Where the prompt's tokens begin in their text, counted from its end: a special token that the tokenizer put
        before it, or the space with which some begin every text, is not part of it."""
        decoder = _Utf8Decoder("replace")
        starts, num_characters = [], 0
        for token_id in self.prompt:
            starts.append(num_characters)
            num_characters += len(decoder.decode(self._tokenizer.token_bytes(token_id)))
        num_missing = num_characters + len(decoder.decode(b"", final=True)) - len(text)
        return [max(0, start - num_missing) for start in starts]

    def _told(self, token_id: int, logprobs: LogprobEntry, offset: int) -> ScoredToken:
        spelled = self._tokenizer.token_bytes.text_and_bytes
        top = tuple(
            ScoredToken(top_id, *spelled(top_id), logprob)
            for top_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        )
        text, raw = spelled(token_id)
        return ScoredToken(token_id, text, raw, logprobs.logprob, logprobs.rank, top, offset)


class _Pieces:
    """What one batch brings, gathered."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.token_ids: list[int] = []

    def tell(self, num_before: int, logprob: ScoredToken) -> None:
        """The log probability of a token goes with the last piece that it brought, of those from num_before on."""
        if len(self.deltas) > num_before:
            self.deltas[-1].logprobs = (logprob,)
        else:
            self.deltas.append(Delta(logprobs=(logprob,)))

    def joined(self) -> Delta:
        deltas = self.deltas
        joined = Delta(
            text="".join(delta.text for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=joined_calls(call for delta in deltas for call in delta.tool_calls),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        )
        if bool(joined.text) + bool(joined.reasoning) + bool(joined.tool_calls) > 1:
            joined.parts = tuple(deltas)
        return joined
