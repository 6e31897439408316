"""The house has floors, and imports only go down."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "daskrr"
LIBRARY = {"errors", "kernels", "numerics", "engine", "nystrom"}
MAY_IMPORT = {
    "__init__": set(),
    "errors": set(),
    "config": set(),
    "plots": set(),
    "theory": {"errors"},
    "synthetic": {"errors"},
    "kernels": {"errors"},
    "spectra": {"errors", "kernels"},
    "exact": {"errors", "kernels", "spectra"},
    "numerics": {"errors"},
    "engine": {"errors", "config", "numerics"},
    "nystrom": {"errors", "kernels", "numerics", "engine", "theory"},
    "top": {"errors"},
    "receipts": LIBRARY | {"top"},
    "aggregates": LIBRARY | {"top"},
    "pictures": {"errors", "engine", "aggregates", "top"},
    "dimensions": LIBRARY,
    "ledger": set(),
    "result": LIBRARY | {"ledger", "dimensions", "receipts", "top", "aggregates", "pictures"},
    "arguments": LIBRARY | {"ledger"},
    "fitting": LIBRARY | {"ledger", "result", "arguments"},
    "growth": LIBRARY | {"result", "arguments", "fitting"},
    "leverage": LIBRARY | {"result", "arguments", "fitting", "growth"},
    "regression": LIBRARY | {"result", "arguments", "growth", "aggregates", "pictures"},
    "identity": {"engine", "arguments", "kernels"},
    "jobstore": {"errors", "engine"},
    "samples": LIBRARY | {"result", "arguments", "jobstore"},
    "jobs": LIBRARY | {"receipts", "result", "arguments", "fitting", "leverage", "identity", "jobstore"},
    "updating": LIBRARY
    | {"ledger", "result", "arguments", "fitting", "growth", "leverage", "identity", "jobs", "jobstore"},
    "loading": LIBRARY | {"regression", "jobstore"},
    "applying": LIBRARY
    | {"top", "aggregates", "receipts", "result", "fitting", "identity", "jobs", "jobstore", "loading"},
    "outputs": LIBRARY | {"top", "jobstore", "aggregates", "pictures"},
    "scoring": LIBRARY | {"top", "arguments", "jobs", "jobstore"},
    "apps": LIBRARY
    | {
        "config",
        "top",
        "result",
        "applying",
        "leverage",
        "loading",
        "outputs",
        "updating",
        "scoring",
        "samples",
        "regression",
        "synthetic",
        "plots",
        "aggregates",
        "pictures",
    },
    "apps.wording": {"engine.progress.duration", "engine.progress.interval", "top.describe_rows"},
}
FORBIDDEN = {
    "numerics": {"dask", "distributed", "zarr"},
    "kernels": {"dask", "distributed", "zarr"},
    "apps.wording": {"click", "dask", "distributed", "zarr"},
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


def room_of(path: Path) -> str:
    """The module where it has a line of its own above, or else the package it is in."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    module = ".".join(parts)
    return module if module in MAY_IMPORT else parts[0]


def is_within(name: str, rooms: set[str]) -> bool:
    return any(f"{name}.".startswith(f"daskrr.{room}.") for room in rooms)


def test_imports__only_go_down_and_stand_at_the_top() -> None:
    rooms = set()
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        rooms.add(room)
        for name, indent in imports_of(ast.parse(path.read_text())):
            parts = name.split(".")
            assert parts[0] not in FORBIDDEN.get(room, ()), f"{path} imports {name}"
            if parts[0] == "daskrr" and parts[1] != "__version__":
                assert indent == 0, f"{path} imports {name} inside a function"
                assert is_within(name, MAY_IMPORT[room] | {room}), f"{path} imports {name}, which is not below {room}"
    assert rooms == set(MAY_IMPORT)


def test_import__is_light() -> None:
    script = "import sys, daskrr, daskrr.apps.cli; print(sorted({'numpy', 'dask', 'zarr', 'scipy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "[]"


def test_names__are_loaded_on_use() -> None:
    script = "import daskrr; print(daskrr.leverage_scores.__module__, 'exact' in dir(daskrr), daskrr.exact.__name__)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["daskrr.leverage", "True", "daskrr.exact"]
