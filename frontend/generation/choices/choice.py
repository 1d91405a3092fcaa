"""One choice of an answer: turns the tokens of one stream into pieces of text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.frontend.generation.choices.output_options import OutputOptions
from penstock.frontend.generation.choices.scored_tokens import named_by_id, score_prompt, score_token, with_own_first
from penstock.frontend.generation.choices.stop_strings import StopMatcher
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta, ScoredToken, join_tool_calls
from penstock.frontend.text.tokenizer import ModelTokenizer
from penstock.shm.client import LogprobEntry, TokenBatch, TokenStream
from penstock.shm.messages import Finish, Keep


@dataclass(frozen=True, slots=True)
class ChoicePrompt:
    """The prompt of a choice; index counts the request's prompts."""

    index: int
    token_ids: Sequence[int]
    text: str | None = None
    """The text to echo; None decodes the token ids."""
    max_tokens: int = 0
    """The limit of its answers."""


class Choice:
    """Reads one stream."""

    def __init__(
        self, index: int, prompt: ChoicePrompt, stream: TokenStream, tokenizer: ModelTokenizer, options: OutputOptions
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.num_tokens = 0
        """Tokens that the model generated, up to the one that ended the text."""
        self.num_reasoning_tokens = 0
        self.sum_logprob = 0.0
        """Sum over the counted tokens, if the stream has log probabilities."""
        self.finish_reason: str | None = None
        self.stopped_by: str | int | None = None
        """The request's stop string or stop token id that ended the text."""
        self._tokenizer = tokenizer
        self._options = options
        self.is_text_only = options.is_text_only
        """All of it is text, and none of its tokens can end it here."""
        self._num_characters = 0
        """Characters of the text so far, including what a stop string will cut off."""
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=options.skips_special_tokens, kept_ids=options.kept_token_ids
        )
        self._stops = StopMatcher(options.stop_strings, keeps_match=options.includes_stop)
        self._parser = None if options.shape is None else options.shape.new_parser()
        self._num_calls = 0
        """Calls that are reported and not broken."""
        self._has_begun = False
        self._echo: Delta | None = None

    @property
    def num_generated(self) -> int:
        """Tokens that count as generated: those of the text, or all received tokens if the text was cut short."""
        return self.num_tokens if self.finish_reason is not None else self.stream.num_generated

    @property
    def is_accepted(self) -> bool:
        """Whether the backend may have computed something for it: it gave tokens, or did not refuse the request."""
        return self.stream.num_generated > 0 or self.stream.finish not in (Finish.REJECTED, Finish.FAILED)

    @property
    def grammar_field(self) -> str | None:
        """The body's field that asks for a grammar."""
        return self._options.grammar_field

    @property
    def reported_prompt(self) -> Sequence[int]:
        """The prompt's token ids if the request asks for token ids; otherwise empty."""
        return self.prompt.token_ids if self._options.returns_token_ids else ()

    @property
    def reports_prompt_logprobs(self) -> bool:
        """Whether the answer has log probabilities of the prompt: up to MAX_PROMPT_LOGPROB_CELLS, all at once."""
        options = self._options
        return options.returns_prompt_logprobs or (options.echoes_prompt and options.returns_logprobs)

    def prepare_echo(self) -> None:
        """Prepare the echoed prompt, if the request asks for one. Callable from any thread.

        The stream's first batch must have arrived. `take` calls this if nobody else has.
        """
        if self._options.echoes_prompt and self._echo is None:
            text = self.prompt.text
            if text is None:
                text = self._tokenizer.decode(self.prompt.token_ids, skip_special_tokens=False)
            logprobs = self.prompt_logprobs(text) if self._options.returns_logprobs else []
            if self._options.names_tokens_by_id:
                logprobs = [named_by_id(scored) for scored in logprobs]
            self._echo = Delta(text, logprobs=tuple(logprobs))

    def prompt_logprobs(self, text: str = "") -> list[ScoredToken]:
        """Return the prompt's tokens with their log probabilities, available after the first batch.

        text is the prompt's text, for the offsets.
        """
        return score_prompt(self._tokenizer.token_bytes, self.prompt.token_ids, self.stream.prompt_logprobs, text)

    def take(self, batch: TokenBatch) -> Delta:
        """Return the piece that is certain after this batch. Sets finish_reason when the choice is complete."""
        if self.is_text_only and batch.finish is Finish.NONE:
            self.num_tokens += len(batch.token_ids)
            return Delta(self._detokenizer.push(batch.token_ids))
        pieces = _Pieces()
        if not self._has_begun and batch.token_ids:
            self._has_begun = True
            self.prepare_echo()
            if self._echo is not None:
                self._num_characters = len(self._echo.text)
                pieces.deltas.append(self._echo)
        if self._options.prompt_only:
            if batch.finish in (Finish.STOP, Finish.LENGTH):
                self.finish_reason = "length"
            return pieces.joined()
        self._take_tokens(batch, pieces)
        if self.finish_reason is None and batch.finish in (Finish.STOP, Finish.LENGTH):
            self._end(batch.finish, pieces)
        return pieces.joined()

    def complete(self, output: ChoiceOutput) -> None:
        """Add to the output the parts that no piece contained."""
        output.finish_reason = self.finish_reason or "stop"
        output.stopped_by = self.stopped_by
        if self._options.returns_token_ids:
            output.prompt_token_ids = list(self.prompt.token_ids)
        if self._options.returns_prompt_logprobs:
            output.prompt_logprobs = self.prompt_logprobs()

    def _take_tokens(self, batch: TokenBatch, pieces: _Pieces) -> None:
        """Take tokens one by one, so that batching does not change the result."""
        last = len(batch.token_ids) - 1
        for position, token_id in enumerate(batch.token_ids):
            entry = None if batch.logprobs is None else batch.logprobs[position]
            self.num_tokens += 1
            if entry is not None:
                self.sum_logprob += entry.logprob
            if self._options.returns_token_ids:
                pieces.token_ids.append(token_id)
            if batch.finish is Finish.STOP and position == last and not self._keeps_stop_token(token_id):
                if entry is not None and self._options.reports_end_token:
                    pieces.add_logprob(len(pieces.deltas), self._scored(token_id, entry, self._num_characters))
                return
            self._take_text_token(token_id, entry, pieces)
            if self._stops.matched is not None or (self._parser is not None and self._parser.is_complete):
                self.stream.cancel(Keep.TOKENS)
                self._end(Finish.STOP, pieces)
                return

    def _keeps_stop_token(self, token_id: int) -> bool:
        """Record the token if it is a stop token of the request. Return whether it is part of the text."""
        if token_id not in self._options.stop_token_ids:
            return False
        self.stopped_by = token_id
        return self._options.includes_stop

    def _take_text_token(self, token_id: int, entry: LogprobEntry | None, pieces: _Pieces) -> None:
        was_reasoning = self._parser is not None and self._parser.is_reasoning
        num_deltas, offset = len(pieces.deltas), self._num_characters
        self._add_text(self._detokenizer.push((token_id,)), pieces)
        if was_reasoning or (self._parser is not None and self._parser.is_reasoning):
            self.num_reasoning_tokens += 1
        if entry is not None and self._options.returns_logprobs:
            pieces.add_logprob(num_deltas, self._scored(token_id, entry, offset))

    def _end(self, finish: Finish, pieces: _Pieces) -> None:
        # Adds nothing if a stop string has matched.
        self._add_text(self._detokenizer.flush(), pieces)
        if self._parser is not None:
            self._add(self._parser.flush(was_cut=finish is not Finish.STOP), pieces)
        if held := self._stops.flush():
            pieces.deltas.append(Delta(held))
        if self._stops.matched is not None:
            self.stopped_by = self._stops.matched
        if finish is Finish.STOP or self.stopped_by is not None:
            self.finish_reason = "tool_calls" if self._num_calls else "stop"
        else:
            self.finish_reason = "length"

    def _add_text(self, text: str, pieces: _Pieces) -> None:
        self._num_characters += len(text)
        if text:
            self._add([Delta(text)] if self._parser is None else self._parser.push(text), pieces)

    def _add(self, deltas: list[Delta], pieces: _Pieces) -> None:
        """Add deltas up to a stop string. Stop strings count in the answer's text, not in reasoning or tool calls."""
        for delta in deltas:
            if self._stops.matched is not None:
                return
            if delta.text and self.num_tokens > self._options.min_tokens:
                delta.text = self._stops.push(delta.text)
            self._num_calls += sum(call.id is not None for call in delta.tool_calls) - delta.is_call_broken
            pieces.deltas.append(delta)

    def _scored(self, token_id: int, entry: LogprobEntry, offset: int) -> ScoredToken:
        if self._options.names_logprob_tokens:
            entry = with_own_first(token_id, entry)
        scored = score_token(self._tokenizer.token_bytes, token_id, entry, offset)
        return named_by_id(scored) if self._options.names_tokens_by_id else scored


class _Pieces:
    """Gathers the pieces that one batch makes certain."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.token_ids: list[int] = []

    def add_logprob(self, num_before: int, scored: ScoredToken) -> None:
        """Attach a token to the last delta that it produced; num_before deltas are older than the token."""
        if len(self.deltas) > num_before:
            self.deltas[-1].logprobs = (scored,)
        else:
            self.deltas.append(Delta(logprobs=(scored,)))

    def joined(self) -> Delta:
        deltas = self.deltas
        joined = Delta(
            text="".join(delta.text for delta in deltas),
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=join_tool_calls(call for delta in deltas for call in delta.tool_calls),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(scored for delta in deltas for scored in delta.logprobs),
        )
        is_mixed = bool(joined.text) + bool(joined.reasoning) + bool(joined.tool_calls) > 1
        if is_mixed or any(delta.is_call_broken for delta in deltas):
            joined.parts = tuple(deltas)
        return joined
