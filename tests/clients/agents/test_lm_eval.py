"""lm-eval: likelihoods and texts by /v1/completions, with the server's tokenizer (tokenizer_backend=remote)."""

from __future__ import annotations

from typing import Any


def instances(kind: str, *arguments: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_remote_tokenizer_scores_and_generates(server_url: str) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model="penstock-demo",
        base_url=f"{server_url}/v1/completions",
        tokenizer_backend="remote",
        max_length=512,
        num_concurrent=1,
    )
    likely, unlikely = model.loglikelihood(
        instances("loglikelihood", ("def f(x):\n    return", " x"), ("def f(x):\n    return", " banana")),
        disable_tqdm=True,
    )
    assert unlikely[0] < likely[0] < 0
    until = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}
    (text,) = model.generate_until(instances("generate_until", ("import os\n", until)), disable_tqdm=True)
    assert text
    assert "\n\n" not in text
