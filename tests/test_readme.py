"""The README's examples, run as a reader would run them."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from distributed import LocalCluster

from daskrr.apps.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cluster: LocalCluster) -> Path:
    """A folder with the points.csv and tonight.zarr that the README speaks of, after its commands have run there.

    The first that needs a cluster starts its own, the others are given one to save time.
    """
    where = tmp_path_factory.mktemp("readme")
    points = np.random.default_rng(0).standard_normal((2000, 3))
    np.savetxt(where / "points.csv", points, delimiter=",", header="x,y,z", comments="")
    zarr.create_array(where / "tonight.zarr", data=np.random.default_rng(1).standard_normal((300, 3)))
    (job,) = blocks("toml")
    (where / "job.toml").write_text(job)
    commands = [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    assert [shlex.split(command)[1] for command in commands] == [
        *("convert", "plan", "score", "top", "report", "sample", "apply", "score"),
        *("convert", "convert", "select", "fit", "predict"),
        *("run", "run"),
    ]
    seen: set[str] = set()
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "daskrr"
        if seen and words[1] in ("apply", "score", "select", "fit", "predict"):
            words += ["--cluster", cluster.scheduler_address]
        seen |= {words[1]} & {"score"}
        if words[1] in ("convert", "plan", "top", "report", "sample", "run"):
            with contextlib.chdir(where):
                result = CliRunner().invoke(main, words[1:])
            assert result.exit_code == 0, result.stderr
            assert result.stdout
            continue
        run = [sys.executable, "-m", "daskrr.apps.cli", *words[1:]]
        done = subprocess.run(run, cwd=where, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    return where


def test_commands__score_the_points(folder: Path) -> None:
    scores = zarr.open_array(folder / "scores.zarr" / "scores", mode="r")[:]
    assert scores.shape == (2000,)
    assert np.all((scores > 0) & (scores < 1))


def test_python_examples__run_in_order_and_agree_with_the_commands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    names: dict = {}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        for example in blocks("python"):
            exec(compile(example, "README.md", "exec"), names)
    stored = [
        zarr.open_array(folder / name / "scores", mode="r")[:] for name in ("scores.zarr", "scores-from-python.zarr")
    ]
    np.testing.assert_array_equal(*stored)
    alone = [line for line in output.getvalue().splitlines() if re.fullmatch(r"-?\d\S*e?\S*", line)]
    assert len(alone) == 1
    assert float(alone[0]) < 1e-12
    assert names["model"].score(names["X"], names["y"]) > 0.9


def test_links__lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (Path(__file__).parents[1] / link).exists(), link
