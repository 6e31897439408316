"""The house has floors, and imports only go down."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import mutate
import pytest

import daskrr

PACKAGE = Path(__file__).parents[1] / "daskrr"
# Each imports only what stands before it.
LAYERS = (
    "__init__", "errors", "config", "machine", "kernels", "numerics", "plots", "theory", "spectra", "exact",
    "synthetic", "storage", "tables", "runtime", "nystrom", "leverage", "regression", "jobs", "apps", "preload",
)  # fmt: skip
# The house is kept small.
MAX_NAMES_AT_THE_DOOR, MAX_PARAMETERS, MAX_LINES = 18, 13, 450
FORBIDDEN = {
    "numerics": {"dask", "distributed", "zarr"},
    "kernels": {"dask", "distributed", "zarr"},
    "apps.text": {"click", "dask", "distributed", "zarr"},
}


def imports_of(tree: ast.AST) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.col_offset) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [(f"{node.module}.{alias.name}", node.col_offset) for alias in node.names]
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def forbidden_to(path: Path) -> set[str]:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return FORBIDDEN.get(module, FORBIDDEN.get(layer_of(path), set()))


def test_imports__only_go_down_and_stand_at_the_top() -> None:
    for path, tree in trees():
        below = LAYERS[: LAYERS.index(layer_of(path)) + 1]
        for name, indent in imports_of(tree):
            parts = name.split(".")
            assert parts[0] not in forbidden_to(path), f"{path} imports {name}"
            if parts[0] == "daskrr" and parts[1] != "__version__":
                assert indent == 0, f"{path} imports {name} inside a function"
                assert parts[1] in below, f"{path} imports {name}, which is above it"
    assert {layer_of(path) for path in PACKAGE.rglob("*.py")} == set(LAYERS)


def test_import__is_light() -> None:
    script = "import sys, daskrr, daskrr.apps.cli; print(sorted({'numpy', 'dask', 'zarr', 'scipy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_commands__load_what_they_need_and_no_more() -> None:
    """Estimators, pictures and frames take as long to load as all else together, and most commands use none."""
    script = (
        "import sys, daskrr.apps.cli.commands; print(sorted({'sklearn', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


USAGE_ERRORS = {
    "score": "Missing argument",
    "score a b --bogus": "No such option",
    "frobnicate": "No such command",
    "score a b --ridge 1 --kernel linear --kernel-spec {}": "give one of --kernel and --kernel-spec",
    "score a b --ridge 1 --kernel gaussian": "needs --length-scale",
    "score a b --ridge 1 --kernel linear --length-scale 3": "does not apply to the linear kernel",
    "plan a --ridge 1 --kernel linear --sampling uniform": "give it with --landmarks",
    "plan a --ridge 1 --kernel linear --landmarks 9 --tolerance 1": "--tolerance is there to find it",
    "plan a --ridge 1 --kernel linear --landmarks 9 --audit-rows 9": "goes with --certify",
    "plan a --ridge 1 --kernel linear --epsilon 1": "does not apply to residual sampling",
    "plan a --ridge 1 --kernel-spec {} --degree 2": "does not go with --kernel-spec",
    "plan a --ridge 1 --kernel linear --allow-function a:b": "goes with --kernel-spec only",
    "fit a b c --kernel linear --ridge 1 --ridge 2": "a model has one --ridge",
    "select a b c --kernel matern": "needs --length-scales",
    "select a b c --length-scales 1:2": "must be FROM:TO:COUNT",
    "select a b c --ridges x": "must be FROM:TO:COUNT",
    "sample a b --size 0": "Invalid value",
}
HEAVY = {"numpy", "dask", "distributed", "zarr", "scipy", "rich", "psutil"}


def test_usage_errors__are_told_before_anything_is_loaded() -> None:
    script = f"""
import click.testing, sys
from daskrr.apps.cli import main
for line, complaint in {USAGE_ERRORS}.items():
    found = click.testing.CliRunner().invoke(main, line.split())
    assert found.exit_code == 2 and complaint in found.output, (line, found.output)
assert click.testing.CliRunner().invoke(main, ["--help"]).exit_code == 0
print(sorted({HEAVY} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (found.stdout.strip(), found.stderr) == ("[]", "")


@pytest.mark.slow
def test_names__are_loaded_on_use() -> None:
    script = "import daskrr; print(daskrr.leverage_scores.__module__, 'exact' in dir(daskrr), daskrr.exact.__name__)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["daskrr.leverage", "True", "daskrr.exact"]


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Every file of the package and what it says."""
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def definitions(kind: tuple[type, ...]) -> list[tuple[Path, Any]]:
    """Every definition of a kind in the package, with its file."""
    return [(path, node) for path, tree in trees() for node in ast.walk(tree) if isinstance(node, kind)]


def test_door__has_few_names() -> None:
    assert len(set(daskrr.__all__) - {"__version__"}) <= MAX_NAMES_AT_THE_DOOR
    assert all(hasattr(daskrr, name) for name in daskrr.__all__)


def test_classes__have_a_name_of_their_own() -> None:
    homes = Counter(node.name for _, node in definitions((ast.ClassDef,)))
    assert [name for name, count in homes.items() if count > 1] == []


def test_functions__have_few_parameters() -> None:
    for path, node in definitions((ast.FunctionDef, ast.AsyncFunctionDef)):
        given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        assert len(set(given) - {"self", "cls"}) <= MAX_PARAMETERS, f"{path}: {node.name} has {len(given)} parameters"


def test_defects__that_are_planted_by_hand_have_their_place_in_the_code() -> None:
    for one in mutate.DEFECTS:
        assert (PACKAGE / one.file).read_text().count(one.right) == 1, f"{one.name}: not in {one.file} any more"


def test_modules__fit_their_rooms() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, f"{path} is too long"
