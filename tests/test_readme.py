"""The documents: examples run as a reader would run them, and whatever they name is there."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import LocalCluster
from test_layers import LAYERS

import daskrr
from daskrr.apps.cli import main

ROOT = Path(__file__).parents[1]
README, GUIDE, DEPLOY = "README.md", "daskrr/GUIDE.md", "deploy/README.md"
DESIGN, BENCHMARKS = "daskrr/README.md", "benchmarks/README.md"
# The examples of each go on in the folder where those before it have run.
DOCUMENTS = (README, GUIDE, DEPLOY, DESIGN, BENCHMARKS)
PAGES = sorted(
    str(path.relative_to(ROOT))
    for part in (*DOCUMENTS, "deploy/*/README.md", "benchmarks/paper/README.md")
    for path in ROOT.glob(part)
)
STARTS_A_CLUSTER = {"score", "apply", "select", "fit", "predict"}
README_LINES = 160


def read(document: str) -> str:
    return (ROOT / document).read_text()


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", read(document), flags=re.MULTILINE | re.DOTALL)


def prose(document: str) -> str:
    return re.sub(r"^```.*?^```$", "", read(document), flags=re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[list[str]]:
    lines = [line for block in blocks(document, "console") for line in block.splitlines()]
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


def table(document: str, section: str) -> list[list[str]]:
    """Cells of the rows of the table in a section."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", read(document), flags=re.MULTILINE | re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip("` ") for cell in row] for row in rows[2:]]


def run_command(words: list[str], where: Path) -> None:
    with contextlib.chdir(where):
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, (words, result.stderr)
    assert result.stdout, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster) -> Path:
    """A folder with the points.csv, tonight.csv and job.toml of the documents, after their commands have run there.

    Those that would start a cluster are given one: starting it takes longer than all they do.
    """
    where = tmp_path_factory.mktemp("documents")
    points = np.random.default_rng(0).standard_normal((1000, 3))
    np.savetxt(where / "points.csv", points, delimiter=",", header="x,y,z", comments="")
    tonight = np.random.default_rng(1).standard_normal((300, 3))
    np.savetxt(where / "tonight.csv", tonight, delimiter=",", header="x,y,z", comments="")
    (job,) = blocks(DEPLOY, "toml")
    (where / "job.toml").write_text(f'{job}\n[cluster]\ncluster = "{cluster.scheduler_address}"\n')
    for program, *words in [command for document in DOCUMENTS for command in commands(document)]:
        assert program == "daskrr"
        on = ["--cluster", cluster.scheduler_address] if words[0] in STARTS_A_CLUSTER else []
        run_command([*words, *on], where)
    return where


def run_python(document: str) -> tuple[dict, str]:
    """Names that the examples of a document leave, and what they print."""
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for example in blocks(document, "python"):
            exec(compile(example, document, "exec"), names)
    return names, output.getvalue()


def test_commands__are_shown_and_score_the_points(folder: Path) -> None:
    assert [words[1] for words in commands(README)] == [
        *("score", "top", "export", "apply", "convert", "plan", "score", "report", "sample")
    ]
    shown = {words[1] for document in DOCUMENTS for words in commands(document)}
    assert shown | {"demo", "update", "status", "verify", "rollback"} == set(main.commands)
    scores = zarr.open_array(folder / "scores.zarr" / "scores", mode="r")[:]
    assert scores.shape == (1000,)
    assert np.all((scores > 0) & (scores < 1))


def test_readme__python_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names, printed = run_python(README)
    assert names["model"].score(names["X"], names["y"]) > 0.9
    assert str(names["result"].certificate) in printed


@pytest.mark.slow
def test_guide__python_runs_and_agrees_with_the_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names, _ = run_python(GUIDE)
    stored = [
        zarr.open_array(folder / name / "scores", mode="r")[:] for name in ("scores.zarr", "scores-from-python.zarr")
    ]
    np.testing.assert_array_equal(*stored)
    exact = daskrr.exact.leverage_scores(names["X"], names["matern"], 1e-2)
    assert np.max(names["approximate"] - exact) < 1e-12
    assert names["model"].score(names["X"], names["y"]) > 0.9


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python__that_is_not_run_can_be_read(document: str) -> None:
    for example in blocks(document, "py"):
        compile(example, document, "exec")
    assert document in (README, GUIDE) or not blocks(document, "python")


def anchors(page: Path) -> set[str]:
    """Names of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(str(page.relative_to(ROOT))), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", PAGES)
def test_links__lead_to_files_and_headings(document: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", prose(document)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        page = (ROOT / document).parent / path if path else ROOT / document
        assert page.exists(), link
        assert not anchor or anchor in anchors(page.resolve()), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_names__in_prose_are_those_of_the_code(document: str) -> None:
    for name in re.findall(r"`((?:daskrr|tests|benchmarks|deploy)/[\w./-]+)`", prose(document)):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`daskrr\.((?!yaml)[\w.-]+)`", prose(document)):
        here = daskrr
        if dask.config.get(f"daskrr.{name}", None) is None:
            for part in name.split("."):
                here = getattr(here, part)


def test_design__names_modules_that_exist() -> None:
    package = ROOT / "daskrr"
    named = re.findall(r"`([a-z_]+/[a-z0-9_]+)`", prose(DESIGN))
    assert named
    for name in named:
        assert (package / f"{name}.py").exists(), name


def test_design__layers_are_those_that_hold() -> None:
    assert [layer for layer, _ in table(DESIGN, "Layers")] == list(LAYERS)


def test_glossary__has_words_that_the_code_uses_in_their_order() -> None:
    words = [word for word, _ in table(DESIGN, "Glossary")]
    assert words == sorted(words)
    assert len(words) >= 14
    code = "\n".join(path.read_text() for path in (ROOT / "daskrr").rglob("*.py")).lower()
    assert [word for word in words if len(re.findall(rf"\b{word}s?\b", code)) < 5] == []


def test_exit_codes__are_those_of_the_help() -> None:
    told = CliRunner().invoke(main, ["--help"]).stdout
    assert table(DEPLOY, "Exit codes") == [list(pair) for pair in re.findall(r"^    (\d+) +(.+)$", told, re.MULTILINE)]


def test_numbers__name_their_files_and_no_file_is_left_out() -> None:
    for *_, file in table(README, "Numbers"):
        assert re.fullmatch(r"\[bench_\w+\]\(benchmarks/results/bench_\w+\.json\)", file), file
    for path in (ROOT / "benchmarks" / "results").glob("bench_*.json"):
        assert f"](results/{path.name})" in read(BENCHMARKS), path.name


def test_readme__is_short_and_has_each_of_the_two_commands_once() -> None:
    assert len(read(README).splitlines()) <= README_LINES
    for command in ("venv/bin/python -m pytest", "venv/bin/daskrr demo"):
        (line,) = [line for line in read(README).splitlines() if command in line]
        assert line.startswith("python3 -m venv venv && venv/bin/pip install ")
