"""The notebooks run from top to bottom, as a reader would run them."""

import os
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="pip install '.[deploy]'")
nbformat = pytest.importorskip("nbformat", reason="pip install '.[deploy]'")
pytest.importorskip("ipykernel", reason="pip install '.[jupyter]'")
pytestmark = pytest.mark.deploy

NOTEBOOKS = sorted((Path(__file__).parents[2] / "deploy/jupyter").glob("*.ipynb"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in; commands are those of this environment."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_notebooks__are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["guide", "nightly", "regression", "tour"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook__stores_no_output(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert len(code) >= 5
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook__runs_from_top_to_bottom(path: Path, here: Path) -> None:
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        if cell.source.startswith("!"):
            cell.source += "\nassert _exit_code == 0, _exit_code"
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": here}}).execute()
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")
