"""The `penstock bench` command: which subcommand runs which measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import Group, Parameter

from penstock.process.failure import fail
from penstock.process.options import make_app
from penstock.tools.bench.errors import COMMAND

if TYPE_CHECKING:
    from cyclopts import CycloptsError

_PACKAGE = "penstock.tools.bench"
_HELP = (
    "Measures a server, or one part of it. Each measurement is a subcommand with options of its own, which "
    "`penstock bench NAME --help` shows. Without a name, `load` runs."
)

_OVER_HTTP = {
    "load": "Throughput and latency of any OpenAI endpoint (--url).",
    "compare": "Penstock and other servers in turns, on one machine.",
    "storm": "Clients hang up at random; then every page must be free.",
    "static": "Continuous batching against one static batch.",
    "floor": "The server's decode step against the bare work of the step.",
    "one-stream": "A decode step of one stream against reading the weights once.",
    "frontend-cost": "Frontend CPU time for each streamed token.",
    "workers-scaling": "Two frontend workers against one.",
    "coalescing": "Eight identical greedy streams against one alone.",
    "shared-prefix": "Prompt tokens computed when many requests share a prefix.",
    "scored-prompts": "A prompt's log probabilities, as lm-eval asks for them, against a prefill.",
    "interference": "Gaps in running streams while a long prompt arrives.",
    "fairness": "Short requests beside another tenant's flood of long ones.",
}
_OF_REPLICAS = {
    "failover": "One of two replicas killed under load: gaps and texts.",
    "routers": "Proxies in front of the same servers: what is computed twice, and what the hop costs.",
    "fleet": "Routing among 10 to 1,000 simulated backends: cache hits, waiting times, deaths.",
}
_OF_ENCODERS = {
    "embeddings": "Texts to vectors, beside other servers and libraries.",
}
_WITHOUT_SERVER = {
    "scheduling": "CPU time of a turn of the backend's loop.",
    "channel-sweep": "The same load with 0 to 4 plans prepared ahead.",
    "ipc": "CPU time to carry a token from the backend to a frontend.",
    "mask-cost": "CPU time of a grammar's mask for each row and step.",
    "quantization": "Perplexity and logits of int8 and int4 weights.",
    "formats": "Memory and speed of quantised checkpoints of other programs.",
    "growth": "A decode step against context, rows and vocabulary.",
    "attention": "Decode attention on the CPU against reading the keys and values once.",
}
_REPLACED_OPTIONS = {f"--{name}": name for name in (*_OVER_HTTP, *_WITHOUT_SERVER)} | {"--compare": "static"}
"""Options of earlier versions that chose a measurement, and the subcommand of each."""


def _fail_in_one_line(error: CycloptsError) -> NoReturn:
    fail(COMMAND, " ".join(str(error).split()))


app = make_app("bench", _HELP)
app.error_formatter = _fail_in_one_line

for _package, _group, _measurements in (
    ("serving", Group("Measurements of a server, over HTTP", sort_key=0), _OVER_HTTP),
    ("replicas", Group("Measurements of several backends", sort_key=1), _OF_REPLICAS),
    ("encoders", Group("Measurements of embedding models, over HTTP", sort_key=2), _OF_ENCODERS),
    ("components", Group("Measurements of one part, without a server", sort_key=3), _WITHOUT_SERVER),
):
    for _place, (_name, _line) in enumerate(_measurements.items()):
        _function = _name.replace("-", "_")
        # By name: a measurement's imports are loaded when it runs, not when another is chosen.
        _target = f"{_PACKAGE}.{_package}.{_function}:{_function}"
        app.command(_target, name=_name, help=_line, group=_group, sort_key=_place)


@app.default
def _load_by_default(
    *arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True, show_env_var=False)],
) -> Any:
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in _REPLACED_OPTIONS:
            fail(COMMAND, f"{option} is now a subcommand: use `{COMMAND} {_REPLACED_OPTIONS[option]}`")
    if arguments and not arguments[0].startswith("-"):
        names = ", ".join((*_OVER_HTTP, *_OF_REPLICAS, *_OF_ENCODERS, *_WITHOUT_SERVER))
        fail(COMMAND, f'there is no measurement "{arguments[0]}"; choose one of {names}')
    return app(["load", *arguments])
