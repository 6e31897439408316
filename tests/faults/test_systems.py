"""Other systems than Linux, as far as they can be had here: what only some of them have is taken away in every process.

A run in process, the command line, and a job that is killed and goes on.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scenes import GENEROUS, digest, make_points, reference, score_command, started, until

import daskrr
from daskrr.jobs import reader
from daskrr.jobs.verification import verify
from daskrr.storage.output import Output

LACKING = {
    "cores": ("os.sched_getaffinity", "os.sched_setaffinity"),
    "signals": ("signal.SIGALRM", "signal.setitimer", "signal.ITIMER_REAL", "signal.pthread_kill",
                "signal.pthread_sigmask"),
    "clocks": ("time.CLOCK_BOOTTIME",),
    "proc": ("proc",),
    "folders": ("os.O_DIRECTORY",),
    "links": ("os.symlink",),
}  # fmt: skip
# Python imports this at its start, in workers too.
SHIM = """
import os, pathlib, signal, sys, time
for name in os.environ["LACKING"].split():
    if name == "proc":
        from daskrr import machine
        machine.PROC = pathlib.Path("/nowhere")
    else:
        module, _, attribute = name.partition(".")
        delattr(sys.modules[module], attribute)
"""
LAZY = """
import sys, numpy as np, daskrr
X = np.random.default_rng(0).standard_normal((900, 3))
found = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 40, random_state=0, block_rows=200)
np.save(sys.argv[1], found.scores.compute())
"""


def environment_of(lacking: str, tmp_path: Path) -> dict[str, str]:
    """Of a process on a system that lacks something, or all of it."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(SHIM)
    names = LACKING.get(lacking, sum(LACKING.values(), ()))
    path = os.pathsep.join([str(tmp_path / "shim"), str(Path(daskrr.__file__).parents[1])])
    return os.environ | {"LACKING": " ".join(names), "PYTHONPATH": path}


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["all", *LACKING])
def test_systems__run_in_process(lacking: str, tmp_path: Path) -> None:
    environment = environment_of(lacking, tmp_path)
    subprocess.run([sys.executable, "-c", LAZY, tmp_path / "scores.npy"], env=environment, check=True, timeout=GENEROUS)
    X = np.random.default_rng(0).standard_normal((900, 3))
    here = daskrr.leverage_scores(X, daskrr.kernels.Gaussian(1.0), 1e-2, 40, random_state=0, block_rows=200)
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), here.scores.compute())


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["all", "proc"])
def test_systems__run_the_command_line(lacking: str, tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", 2000), tmp_path / "out.zarr"
    environment = environment_of(lacking, tmp_path)
    done = subprocess.run(
        score_command(points, output), env=environment, capture_output=True, text=True, timeout=GENEROUS
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert digest(output) == reference(points, tmp_path)


@pytest.mark.slow
def test_systems__go_on_with_a_job_that_was_killed(tmp_path: Path) -> None:
    points, output = make_points(tmp_path / "points.zarr", 40_000), tmp_path / "out.zarr"
    environment = environment_of("all", tmp_path)
    with started(score_command(points, output), env=environment) as process:
        until(
            lambda: Output(output).is_begun and any(one["scored"] for one in reader.status(output)["unfinished"]),
            process,
        )
    # Whether a process of this host is dead cannot be seen everywhere, and then its lease has to run out.
    done = subprocess.run(
        score_command(points, output, "--wait"), env=environment, capture_output=True, text=True, timeout=2 * GENEROUS
    )
    assert done.returncode == 0, done.stderr
    assert digest(output) == reference(points, tmp_path)
    assert verify(output) == []
