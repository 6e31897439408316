"""What kustomize makes of a folder, as far as the manifests of deploy/kubernetes use it."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("cluster", "gpu", "once", "nightly")
# Written in C where there is one: the operator's schemas are long.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
UNDERSTOOD = {"apiVersion", "kind", "namespace", "resources", "patches"}


def documents(path: Path) -> list[Any]:
    """All documents of a YAML file."""
    return list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=LOADER))


def kustomization(folder: Path) -> dict[str, Any]:
    """The kustomization of a folder; it may say only what :func:`build` does."""
    (found,) = documents(folder / "kustomization.yaml")
    assert set(found) <= UNDERSTOOD, f"{folder} says {sorted(set(found) - UNDERSTOOD)}, which no test understands"
    return found


def build(folder: Path) -> list[dict[str, Any]]:
    """The resources of a folder, patched."""
    said = kustomization(folder)
    resources = [one for name in said["resources"] for one in _resources(folder / name)]
    for one in resources:
        if one["kind"] != "Namespace":
            one["metadata"]["namespace"] = said["namespace"]
    for patch in said.get("patches", []):
        hit = [one for one in resources if _is(one, patch["target"])]
        assert hit, f"the patch {patch['path']} of {folder} hits nothing"
        for one in hit:
            _patch(one, documents(folder / patch["path"])[0])
    return resources


def _resources(path: Path) -> list[dict[str, Any]]:
    return build(path.resolve()) if path.is_dir() else documents(path)


def _is(resource: dict[str, Any], target: dict[str, str]) -> bool:
    return resource["kind"] == target["kind"] and resource["metadata"]["name"] == target["name"]


def _patch(resource: dict[str, Any], operations: list[dict[str, Any]]) -> None:
    """Replace values in place, as JSON patches do: what is replaced has to be there."""
    for operation in operations:
        assert operation["op"] == "replace", operation
        *way, last = [int(step) if step.isdigit() else step for step in operation["path"].split("/")[1:]]
        place: Any = resource
        for step in way:
            place = place[step]
        assert last in place if isinstance(place, dict) else last < len(place), f"{operation['path']} is not there"
        place[last] = deepcopy(operation["value"])


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod specification inside a resource."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)
