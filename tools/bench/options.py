"""The options that several measurements share, each declared once; a measurement takes the groups that it uses.

Options of a single measurement are declared in its module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from penstock.serve.options import ServeOptions, private_socket_path
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.load_generator.target import Endpoint, Target
from penstock.tools.bench.load_generator.workload import Lengths, Workload, parse_lengths

_MAX_COUNT = 4096


def _convert_lengths(_type: Any, tokens: Sequence[Token]) -> Lengths:
    return parse_lengths(tokens[0].value)


def parse_counts(text: str) -> tuple[int, ...]:
    """Return "1,4,16" as numbers from 1 to _MAX_COUNT. Raises ValueError for anything else."""
    counts = tuple(int(item) if item.strip().isdecimal() else 0 for item in text.split(","))
    if not all(1 <= count <= _MAX_COUNT for count in counts):
        raise ValueError(f'"{text}" is not a list of counts from 1 to {_MAX_COUNT}; write 1,4,16')
    return counts


def _convert_counts(_type: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    return parse_counts(tokens[0].value)


def _show_counts(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))


LengthRange = Annotated[Lengths, Parameter(converter=_convert_lengths, n_tokens=1, accepts_keys=False)]
Counts = Annotated[
    tuple[int, ...],
    Parameter(converter=_convert_counts, n_tokens=1, negative="", metavar="COUNTS", show_default=_show_counts),
]
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]
NotNegative = Annotated[int, Parameter(validator=Number(gte=0))]
ClientCount = Annotated[int, Parameter(validator=Number(gte=1, lte=_MAX_COUNT))]

MEASUREMENT = Parameter(name="*", group=Group("Measurement", sort_key=1))
"""Decorates dataclasses whose fields are options of a measurement."""


@MEASUREMENT
@dataclass(frozen=True)
class PromptLength:
    prompt_tokens: LengthRange = Lengths(128, 128)  # noqa: RUF009 - frozen
    """Prompt length in tokens: 128, or 16:512 for lengths drawn evenly."""


@MEASUREMENT
@dataclass(frozen=True)
class PromptOptions(PromptLength):
    """The requests of a measurement that runs against any server."""

    output_tokens: LengthRange = Lengths(64, 64)  # noqa: RUF009 - frozen
    """Answer length in tokens: 64, or 16:128 for lengths drawn evenly. Exact if the server supports ignore_eos."""

    endpoint: Endpoint = "completions"
    """Endpoint that receives the requests."""

    prompt_kind: Literal["auto", "tokens", "text"] = "auto"
    """Random token ids or random words; auto takes ids if endpoint and server allow it."""

    vocab_size: AtLeastOne | None = None
    """Upper bound of random token ids. Default: the value in the server's /v1/models."""

    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0
    """Temperature of the requests; 0 is greedy."""

    top_k: NotNegative = 0
    """Most likely tokens that are drawn from; 0 leaves it out of the requests."""

    top_p: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0
    """Mass of the tokens that are drawn from; 1 leaves it out of the requests."""

    presence_penalty: Annotated[float, Parameter(validator=Number(gte=-2, lte=2))] = 0.0
    """Penalty of tokens that the answer has already; 0 leaves it out of the requests."""

    logprobs: NotNegative | None = None
    """Log probabilities that are asked for beside each token."""

    def sampling(self) -> dict[str, Any]:
        """The fields of a request's body."""
        fields: dict[str, Any] = {"temperature": self.temperature}
        for name, off in (("top_k", 0), ("top_p", 1.0), ("presence_penalty", 0.0)):
            if (value := getattr(self, name)) != off:
                fields[name] = value
        if self.logprobs is None:
            return fields
        chat = {"logprobs": True, "top_logprobs": self.logprobs}
        return fields | (chat if self.endpoint == "chat" else {"logprobs": self.logprobs})

    def prompts(self, target: Target) -> Workload:
        """Prompts of token ids if the endpoint takes them and the vocabulary is known. Raises BenchError."""
        vocab_size = self.vocab_size or target.vocab_size
        takes_tokens = self.endpoint == "completions" and vocab_size is not None
        if self.prompt_kind == "tokens" and not takes_tokens:
            raise BenchError("prompts of token ids need --endpoint completions and a known --vocab-size")
        is_text = self.prompt_kind == "text" or not takes_tokens
        return Workload(self.prompt_tokens, self.output_tokens, None if is_text else vocab_size)


@MEASUREMENT
@dataclass(frozen=True)
class TrafficOptions(PromptOptions):
    """The requests of a measurement that runs against any one server, and how they arrive."""

    url: str | None = None
    """Server to measure, such as http://127.0.0.1:8000. Without it, `penstock serve` is started for the run."""

    rate: Annotated[float | None, Parameter(validator=Number(gt=0))] = None
    """Open loop: requests a second, arriving as a Poisson process whether or not earlier ones have ended. Replaces the
    closed loop of --concurrency."""

    duplicates: Share = 0.0
    """Share of requests that repeat an earlier prompt of their row."""

    def traffic(self, target: Target, *, drop: float) -> Workload:
        """Raises BenchError."""
        return replace(self.prompts(target), duplicates=self.duplicates, drop=drop, rate_per_s=self.rate)


@MEASUREMENT
@dataclass(frozen=True)
class SeedOptions:
    seed: NotNegative = 0
    """The same seed draws the same requests."""


@MEASUREMENT
@dataclass(frozen=True)
class SeededRounds(SeedOptions):
    """Rounds of drawn requests."""

    rounds: AtLeastOne = 3
    """Rounds of the measurement; medians over the rounds are reported."""


@MEASUREMENT
@dataclass(frozen=True)
class WarmRounds(SeededRounds):
    """Rounds on a server that is warmed up first."""

    warmup: NotNegative = 4
    """Unmeasured requests before each row of the table."""


@MEASUREMENT
@dataclass(frozen=True)
class RowRounds(WarmRounds):
    """Rounds of one row of load."""

    rounds: AtLeastOne = 1
    """Rounds of each row; the one with the median throughput is reported."""


@MEASUREMENT
@dataclass(frozen=True)
class ReportOptions:
    json: Path | None = None
    """File that receives everything found, as JSON."""


_FIXED = Parameter(parse=False, show=False)
"""Hides a server option that the benchmark decides."""
_SERVER = Parameter(name="*", group=Group("The server it starts", sort_key=2))


@_SERVER
@dataclass(frozen=True)
class BenchServerOptions(ServeOptions):
    """Options of the server that a measurement starts: those of `penstock serve`, except where it listens, and with one
    model."""

    model: str | None = None
    """Checkpoint: a directory in the Hugging Face layout, a hub id, or a GGUF file (of shards the first). Default: the
    small demo model."""

    models: Annotated[tuple[str, ...], _FIXED] = ()
    host: Annotated[str, _FIXED] = "127.0.0.1"
    port: Annotated[int, _FIXED] = 0
    uds: Annotated[Path | None, _FIXED] = None
    uds_mode: Annotated[str, _FIXED] = "660"
    ssl_certfile: Annotated[Path | None, _FIXED] = None
    ssl_keyfile: Annotated[Path | None, _FIXED] = None
    ssl_keyfile_password: Annotated[str | None, _FIXED] = None
    listen_fd: Annotated[int | None, _FIXED] = None
    socket: Annotated[Path, _FIXED] = field(default_factory=private_socket_path)
    dry_run: Annotated[bool, _FIXED] = False


@_SERVER
@dataclass(frozen=True)
class FakeServerOptions(BenchServerOptions):
    """Options of a server over the fake pass, which costs next to nothing, with one worker."""

    forward_pass: Annotated[str, _FIXED] = "fake"  # noqa: S105 - a pass, not a password
    workers: Annotated[int, _FIXED] = 1


# Inherited annotations name types of the modules that declare them; cyclopts would look for the names in this one.
for _class in (BenchServerOptions, FakeServerOptions):
    _class.__init__.__annotations__ = get_type_hints(_class, include_extras=True)
