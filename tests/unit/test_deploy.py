"""The Dockerfile and the Kubernetes example agree with each other and with the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_pat.cli.main import build_parser
from sglang_pat.sglang.start.environment import Environment

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/operate/deploy"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
DEPLOYMENTS = {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == "Deployment"}


def labels_match(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_the_build_context_is_what_a_wheel_is_built_from() -> None:
    """The context contains neither environments of 10 GB nor build outputs."""
    everything, *rest = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    sent = {line.removeprefix("!") for line in rest if line.startswith("!")}
    project, build = PYPROJECT["project"], PYPROJECT["tool"]["scikit-build"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    needed |= {build["cmake"]["source-dir"], *build["wheel"]["packages"].values()}
    assert everything == "*"
    assert sent == needed
    assert all((ROOT / name).exists() for name in sent)
    assert {"**/__pycache__", "**/*.so"} == {line for line in rest if not line.startswith("!")}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_deployment_selects_its_own_pods(name: str) -> None:
    spec = DEPLOYMENTS[name]["spec"]
    assert labels_match(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])
    (container,) = spec["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            assert container[probe]["httpGet"]["port"] in ports
    volumes = {volume["name"] for volume in spec["template"]["spec"].get("volumes", ())}
    assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes


def test_services_lead_to_pods_and_their_ports() -> None:
    services = [each for each in OBJECTS if each["kind"] == "Service"]
    assert len(services) == len(DEPLOYMENTS)
    for service in services:
        (target,) = (
            deployment["spec"]["template"]
            for deployment in DEPLOYMENTS.values()
            if labels_match(
                service["spec"]["selector"], deployment["spec"]["template"]["metadata"]["labels"]
            )
        )
        ports = {port["name"] for port in target["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_the_router_finds_the_workers_and_may_look() -> None:
    pod = DEPLOYMENTS["sglang-router"]["spec"]["template"]["spec"]
    arguments = dict(
        argument.removeprefix("--").split("=", 1)
        for argument in pod["containers"][0]["args"]
        if "=" in argument
    )
    name, _, value = arguments["selector"].partition("=")
    worker = DEPLOYMENTS["sglang-pat"]["spec"]["template"]
    assert worker["metadata"]["labels"][name] == value
    (port,) = worker["spec"]["containers"][0]["ports"]
    assert arguments["service-discovery-port"] == str(port["containerPort"])
    by_kind = {each["kind"]: each for each in OBJECTS}
    assert pod["serviceAccountName"] == by_kind["ServiceAccount"]["metadata"]["name"]
    assert by_kind["RoleBinding"]["roleRef"]["name"] == by_kind["Role"]["metadata"]["name"]
    assert by_kind["RoleBinding"]["subjects"][0]["name"] == pod["serviceAccountName"]
    assert {"list", "watch"} <= set(by_kind["Role"]["rules"][0]["verbs"])


def test_the_worker_serves_where_it_is_scraped() -> None:
    template = DEPLOYMENTS["sglang-pat"]["spec"]["template"]
    annotations = template["metadata"]["annotations"]
    port = str(template["spec"]["containers"][0]["ports"][0]["containerPort"])
    assert annotations["prometheus.io/port"] == port
    assert f'"--port", "{port}", "--enable-metrics"' in DOCKERFILE


def test_the_flag_can_be_left_out_of_an_image_and_of_a_pod() -> None:
    """A rollback only replaces arguments: it needs no new image and no command."""
    entry, given = (
        json.loads(re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[0])
        for name in ("ENTRYPOINT", "CMD")
    )
    container = DEPLOYMENTS["sglang-pat"]["spec"]["template"]["spec"]["containers"][0]
    assert not {"--attention-backend", "pat"} & {*entry}
    for arguments in (given, container["args"]):
        assert arguments[-2:] == ["--attention-backend", "pat"]
        assert "--model-path" in arguments
    assert "command" not in container


def test_the_image_compiles_by_a_command_that_exists() -> None:
    (words,) = re.findall(r"&& sglang-pat (build .*)", DOCKERFILE)
    (kernels,) = re.findall(r'ARG KERNELS="(.*)"', DOCKERFILE)
    words = words.replace('"${ARCH}"', "9.0").replace("${KERNELS}", kernels).replace("/opt", "/tmp")
    arguments = build_parser().parse_args(words.split())
    assert callable(arguments.run)


def test_the_variables_exist() -> None:
    set_in_image = dict(re.findall(r"^ENV (SGLANG_PAT_\w+)=(\S+)", DOCKERFILE, re.MULTILINE))
    container = DEPLOYMENTS["sglang-pat"]["spec"]["template"]["spec"]["containers"][0]
    set_in_pod = {each["name"]: each["value"] for each in container["env"]}
    assert set_in_image == set_in_pod
    Environment.read(set_in_image)
    (cache,) = re.findall(r"--cache (\S+)", DOCKERFILE)
    assert set_in_image["SGLANG_PAT_KERNEL_CACHE"] == cache
