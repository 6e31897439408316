"""The manifests of deploy/kubernetes against the schemas of Kubernetes and of the operator; no cluster is asked."""

import copy
import functools
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from manifests import KUBERNETES, OVERLAYS, build, documents

cronsim = pytest.importorskip("cronsim")
dask_kubernetes = pytest.importorskip("dask_kubernetes")
jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

pytestmark = pytest.mark.deploy

OPERATOR = "kubernetes.dask.org/v1"
CHARTS = Path(dask_kubernetes.__file__).parent / "operator" / "deployment" / "helm"
# The oldest has all that is used here, the newest tells what was removed since.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


@functools.cache
def definitions() -> dict[str, dict[str, Any]]:
    """The operator's schemas by kind."""
    files = (CHARTS / "dask-kubernetes-operator" / "crds").glob("*.yaml")
    found = [definition for file in files for definition in documents(file)]
    return {one["spec"]["names"]["kind"]: one["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for one in found}


def closed(schema: Any) -> Any:
    """A schema that refuses what it does not know; Kubernetes itself would drop that without a word."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    known = {key: closed(value) for key, value in schema.items()}
    return known | {"additionalProperties": False} if "properties" in schema and not open_ended else known


def operator_schema(kind: str) -> dict[str, Any]:
    schema = copy.deepcopy(definitions()[kind])
    schema["properties"] |= {
        "apiVersion": {"const": OPERATOR},
        "kind": {"const": kind},
        "metadata": {
            "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}},
            "required": ["name", "namespace"],
        },
    }
    return closed(schema) | {"required": ["apiVersion", "kind", "metadata", "spec"]}


def mistakes(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource."""
    if resource["apiVersion"] == OPERATOR:
        found = jsonschema.Draft202012Validator(operator_schema(resource["kind"])).iter_errors(resource)
        return [f"{error.json_path}: {error.message}" for error in found]
    found = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version}: {error.message}")
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays__are_valid(overlay: str) -> None:
    found = {
        f"{one['kind']} {one['metadata']['name']}": mistakes(one) for one in build(KUBERNETES / "overlays" / overlay)
    }
    assert not any(found.values()), found
    assert len(found) >= 7


PLANTED = {
    ("nightly", "CronJob", ("spec", "concurencyPolicy")): "Forbid",
    ("nightly", "CronJob", ("spec", "concurrencyPolicy")): ["Forbid"],
    ("nightly", "CronJob", ("spec", "jobTemplate", "spec", "backoffLimit")): "two",
    ("nightly", "CronJob", ("spec", "jobTemplate", "spec", "template", "spec", "runAsNonRoot")): True,
    ("nightly", "NetworkPolicy", ("spec", "podSelectors")): {},
    ("nightly", "ServiceAccount", ("automountServiceAccountToken",)): "no",
    ("nightly", "DaskCluster", ("spec", "workers")): {"replicas": 2},
    ("nightly", "DaskCluster", ("spec", "worker", "replicas")): "four",
    ("once", "DaskJob", ("spec", "job", "spec", "containers", 0, "imag")): "daskrr",
    ("once", "DaskJob", ("spec", "cluster", "spec", "scheduler", "service", "ports", 0, "port")): "8786/tcp ",
    ("once", "DaskJob", ("spec", "cluster", "spec", "worker", "spec", "containers", 0, "args")): "dask worker",
}


@pytest.mark.parametrize(("where", "value"), PLANTED.items(), ids=lambda one: str(one)[:60])
def test_planted_mistakes__are_found(where: tuple[str, str, tuple], value: Any) -> None:
    overlay, kind, path = where
    resource = next(one for one in build(KUBERNETES / "overlays" / overlay) if one["kind"] == kind)
    assert not mistakes(resource)
    place = resource
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert mistakes(resource)


def test_schedule__comes_once_a_night_in_a_zone_that_exists() -> None:
    (cron,) = [one for one in build(KUBERNETES / "overlays" / "nightly") if one["kind"] == "CronJob"]
    start = datetime(2026, 1, 1, tzinfo=ZoneInfo(cron["spec"]["timeZone"]))
    times = cronsim.CronSim(cron["spec"]["schedule"], start)
    assert [next(times).day for _ in range(31)] == list(range(1, 32))
    with pytest.raises(cronsim.CronSimError):
        cronsim.CronSim("17 25 * * *", start)
