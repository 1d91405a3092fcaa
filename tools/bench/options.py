"""Every option of `penstock bench`, declared once; those of the server it starts are `penstock serve`'s own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from penstock.tools.bench.load_generator.sending import Endpoint
from penstock.tools.bench.load_generator.workload import Lengths, parse_lengths


def _convert_lengths(_type: Any, tokens: Sequence[Token]) -> Lengths:
    return parse_lengths(tokens[0].value)


def parse_counts(text: str) -> tuple[int, ...]:
    """ "1,4,16" as numbers from 1 to 4096. Raises ValueError."""
    counts = tuple(int(item) if item.strip().isdecimal() else 0 for item in text.split(","))
    if not all(1 <= count <= 4096 for count in counts):
        raise ValueError(f'"{text}" is not a list of counts from 1 to 4096; write 1,4,16')
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
Mode = Annotated[bool, Parameter(negative="", show_default=False)]
"""A measurement of its own, chosen by its name."""
Share = Annotated[float, Parameter(validator=Number(gte=0, lte=1))]
AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]
NotNegative = Annotated[int, Parameter(validator=Number(gte=0))]


@Parameter(name="*", group=Group("Measurement", sort_key=1))
@dataclass(frozen=True)
class BenchOptions:
    """Load on an OpenAI endpoint, and what its clients see."""

    url: str | None = None
    """Server to measure, such as http://127.0.0.1:8000. Without it `penstock serve` is started for the run."""

    concurrency: Counts = (1, 4, 16, 32)
    """Closed loop: clients at once, each sending its next request when its last has ended. A row for each: 1,4,16."""

    rate: Annotated[float | None, Parameter(validator=Number(gt=0))] = None
    """Open loop instead: requests a second, arriving as a Poisson process whatever is still running."""

    requests: AtLeastOne | None = None
    """Requests of a row. Default: 4 for each client, 8 in a channel sweep; 64 in an open loop or with one prefix, 500
    in a storm."""

    prompt_tokens: LengthRange = Lengths(128, 128)  # noqa: RUF009 - frozen
    """Prompt length: 128, or 16:512 for lengths drawn evenly."""

    output_tokens: LengthRange = Lengths(64, 64)  # noqa: RUF009 - frozen
    """Answer length: 64, or 16:128. Kept exactly where the server knows ignore_eos."""

    duplicates: Share = 0.0
    """Share of requests that repeat an earlier prompt of their row."""

    drop: Share | None = None
    """Share of requests whose client hangs up at a random moment. Default: none; one half in a storm and in the drops
    of a channel sweep."""

    endpoint: Endpoint = "completions"
    """Which of the two endpoints."""

    prompt_kind: Literal["auto", "tokens", "text"] = "auto"
    """Random token ids or random words; auto takes ids where endpoint and server allow it."""

    vocab_size: AtLeastOne | None = None
    """Bounds random token ids. Default: what the server's /v1/models says."""

    warmup: NotNegative = 4
    """Requests before each row that are not measured."""

    rounds: AtLeastOne = 1
    """Repeats of each measurement; the median one by throughput is reported."""

    seed: NotNegative = 0
    """The same seed draws the same requests."""

    compare: Literal["static"] | None = None
    """Continuous batching against one static batch of the same requests, in the same run."""

    stagger_s: Annotated[float, Parameter(validator=Number(gt=0))] = 0.1
    """Seconds between arrivals in the comparison of time to first token."""

    floor: Mode = False
    """The engine's decode step beside the bare work of the step: products and attention alone."""

    frontend_cost: Mode = False
    """Tokens a second through one frontend over a model that costs nothing, and CPU time of each streamed token."""

    storm: Mode = False
    """Many requests of which a share (--drop, here one half) is dropped; then every page must be free again."""

    channel_sweep: Mode = False
    """The same load for 0, 1, 2 and 4 plans prepared ahead: throughput, waste under drops, answer to a spike. No
    server: the real loop, on a simulated device and clock."""

    coalescing: Mode = False
    """Eight identical greedy streams against one alone: wall time, and tokens computed."""

    shared_prefix: Mode = False
    """64 requests (--requests) with one prefix arrive together: prompt tokens computed by distinct ones."""

    prefix_tokens: AtLeastOne = 1000
    """What all of them share."""

    suffix_tokens: AtLeastOne = 32
    """What each has of its own after it."""

    interference: Mode = False
    """Gaps between the tokens of running streams while a long prompt arrives."""

    long_prompt_tokens: AtLeastOne = 2048
    """That prompt's length; less where the context is shorter."""

    scheduling: Mode = False
    """What a turn of the backend's loop costs without a device: 256 sequences run, 10,000 wait. No server."""

    ipc: Mode = False
    """CPU time that carries a token from the backend to a frontend, for each --concurrency of streams. No server, no
    HTTP."""

    mask_cost: Mode = False
    """What a grammar costs for each row and step, with the model's tokenizer and with one of 128,000 tokens. No
    server."""

    workers_scaling: Mode = False
    """One frontend worker against two over a model that costs nothing: tokens a second, and by CPU second."""

    json: Path | None = None
    """Also writes everything here."""
