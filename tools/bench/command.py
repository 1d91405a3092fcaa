"""The `penstock bench` command: which subcommand runs which measurement."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from cyclopts import CycloptsError, Group, Parameter

from penstock.process.failure import USAGE_STATUS, fail
from penstock.process.options import make_app
from penstock.serve.foreign_options import FOREIGN_COMMANDS
from penstock.tools.bench.errors import COMMAND

_HELP = (
    "Measures a server, or one part of it. Each measurement is a subcommand with options of its own, which "
    "`penstock bench NAME --help` shows. Without a name, `load` runs."
)
_SERVING = {
    "load": "Throughput and latency of any OpenAI endpoint (--url), and requests that share work (--shape).",
    "compare": "Penstock and other servers in turns, on one machine.",
    "frontend-cost": "Frontend CPU time for each streamed token.",
    "interference": "Gaps in running streams while a long prompt arrives.",
    "fairness": "Short requests beside another tenant's flood of long ones.",
    "failover": "One of two replicas killed under load: gaps and texts.",
}
_ENCODERS = {
    "embeddings": "Texts to vectors, beside other servers and libraries.",
}
_COMPONENTS = {
    "mask-cost": "CPU time of a grammar's mask for each row and step.",
    "quantization": "Perplexity and speed of a model's weights in each form.",
}


def _fail_in_one_line(error: CycloptsError) -> NoReturn:
    fail(COMMAND, " ".join(str(error).split()), USAGE_STATUS)


app = make_app("bench", _HELP)
app.error_formatter = _fail_in_one_line

for _package, _group, _measurements in (
    ("serving", Group("Measurements of a server, over HTTP", sort_key=0), _SERVING),
    ("encoders", Group("Measurements of embedding models, over HTTP", sort_key=1), _ENCODERS),
    ("components", Group("Measurements of one part, without a server", sort_key=2), _COMPONENTS),
):
    for _place, (_name, _line) in enumerate(_measurements.items()):
        _function = _name.replace("-", "_")
        # By name: a measurement's imports are loaded when it runs, not when another is chosen.
        _target = f"penstock.tools.bench.{_package}.{_function}:{_function}"
        app.command(_target, name=_name, help=_line, group=_group, sort_key=_place)


@app.default
def _load_by_default(
    *arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True, show_env_var=False)],
) -> Any:
    if arguments and not arguments[0].startswith("-"):
        names = ", ".join((*_SERVING, *_ENCODERS, *_COMPONENTS))
        foreign = FOREIGN_COMMANDS.get(f"bench {arguments[0]}")
        advice = f"choose one of {names}" if foreign is None else f"here {foreign}"
        fail(COMMAND, f'there is no measurement "{arguments[0]}"; {advice}', USAGE_STATUS)
    return app(["load", *arguments])
