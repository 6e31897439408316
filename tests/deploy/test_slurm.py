"""The recipes of deploy/slurm, on a SLURM of this machine that is started for them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import slurm
import zarr

import daskrr
from daskrr import kernels

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(bool(slurm.MISSING), reason=f"SLURM is not installed: no {', '.join(slurm.MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's daemons are started as root"),
]
RECIPES = Path(__file__).parents[2] / "deploy" / "slurm"
N_ROWS, BLOCK_ROWS = 20_000, 500
# Passes with so many take seconds, time enough to be told to end.
MANY_LANDMARKS = 1500
JOB = """
input = "points.zarr"
output = "{output}"
[kernel]
kernel = "gaussian"
length-scale = 2
[scores]
ridge = 1e-3
landmarks = {landmarks}
block-rows = {block_rows}
seed = 0
[cluster]
cluster = "slurm"
[cluster.slurm]
minimum = 1
maximum = 2
memory = "700MiB"
interface = "lo"
log-directory = "logs"
{more}
[cluster.slurm-runner]
interface = "lo"
[retries]
attempts = 1
"""
SMALL = ["--mem-per-cpu=1500M", "--time=10"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with points, recipes and a command daskrr, and a SLURM for it; gives the folder and the environment."""
    folder = tmp_path_factory.mktemp("site")
    for recipe in RECIPES.iterdir():
        shutil.copy(recipe, folder)
    rows = np.random.default_rng(0).standard_normal((N_ROWS, 3))
    zarr.create_array(folder / "points.zarr", shape=rows.shape, chunks=(500, 3), dtype=rows.dtype)[:] = rows
    command = folder / "bin" / "daskrr"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m daskrr.apps.cli "$@"\n')
    command.chmod(0o755)
    package = Path(daskrr.__file__).parents[1]
    found = {"PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(package)}
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield folder, os.environ | found | environment


@contextlib.contextmanager
def started(site, *command):
    folder, environment = site
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(site, *command):
    with started(site, *command) as process:
        output, complaints = process.communicate(timeout=slurm.GENEROUS)
        return process.returncode, output, complaints


def submit(site, *words):
    """Number of a new batch job."""
    code, number, complaints = run(site, "sbatch", "--parsable", *SMALL, *words)
    assert code == 0, complaints
    return number.strip()


def ended(site, number):
    """Exit codes of a batch job that ends by itself, or of all in an array."""
    return slurm.until(lambda: slurm.exit_codes(number, site[1]), f"batch job {number} does not end")


def write_job(site, name, more="", landmarks=40):
    text = JOB.format(output=f"{name}.zarr", more=more, landmarks=landmarks, block_rows=BLOCK_ROWS)
    (site[0] / f"{name}.toml").write_text(text)
    return f"{name}.toml"


def scores(path):
    return zarr.open_array(path / "scores", mode="r")[:]


def reference(site, landmarks=40):
    return daskrr.leverage_scores(
        site[0] / "points.zarr", kernels.Gaussian(2.0), 1e-3, landmarks, block_rows=BLOCK_ROWS, random_state=0
    ).scores.compute()  # fmt: skip


def test_run__on_batch_jobs_of_workers_that_come_and_go(site):
    code, output, complaints = run(site, "daskrr", "run", write_job(site, "elastic"), "--json", "--require-tls")
    assert code == 0, complaints
    assert "slurm: waiting for the first of 1 to 2 workers" in complaints
    assert json.loads(output)["action"] == "score"
    np.testing.assert_array_equal(scores(site[0] / "elastic.zarr"), reference(site))
    slurm.until(lambda: not slurm.queue(site[1]), "the batch jobs of the workers go on")
    assert list((site[0] / "logs").iterdir())
    assert not list(site[0].glob(".dask*"))


def test_run__stops_its_batch_jobs_on_an_interrupt(site):
    job = write_job(site, "waiting", 'job-extra-directives = ["--hold"]')
    with started(site, "daskrr", "run", job) as process:
        slurm.until(lambda: slurm.queue(site[1]), "no batch job is submitted")
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=slurm.GENEROUS)
    assert process.returncode == 130, complaints
    assert complaints.endswith("daskrr: interrupted\n")
    slurm.until(lambda: not slurm.queue(site[1]), "the batch jobs of the workers go on")


def test_run__batch_jobs_that_slurm_does_not_take(site):
    code, _, complaints = run(site, "daskrr", "run", write_job(site, "refused", 'queue = "nowhere"'))
    assert code == 2
    assert "SLURM does not take such batch jobs" in complaints
    assert "invalid partition" in complaints
    assert not slurm.queue(site[1])


def test_run__workers_without_daskrr_are_named_at_once(site):
    other = site[0] / "other" / "daskrr"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('raise ImportError("not here")\n')
    job = write_job(site, "without", f'job-script-prologue = ["export PYTHONPATH={other.parent}"]')
    code, _, complaints = run(site, "daskrr", "run", job)
    assert code == 3
    assert "cannot run daskrr: ImportError('not here'). Install daskrr" in complaints
    slurm.until(lambda: not slurm.queue(site[1]), "the batch jobs of the workers go on")


def test_one_shot__goes_on_after_its_time_was_over(site):
    """SLURM sends the signal by itself two minutes before the end; here it is asked to send it now."""
    job = write_job(site, "once", landmarks=MANY_LANDMARKS)
    first = submit(site, "--ntasks=2", "one-shot.sh", job)
    log = site[0] / f"daskrr-{first}.log"
    slurm.until(lambda: log.exists() and "pass 1: gram, " in log.read_text(), "the first pass is not reached")
    assert run(site, "scancel", "--batch", "--signal=TERM", first)[0] == 0
    assert ended(site, first) == ["143"]
    assert log.read_text().endswith("daskrr: terminated\n")
    assert not (site[0] / "once.zarr" / "scores").exists()
    second = submit(site, "--ntasks=2", "one-shot.sh", job)
    assert ended(site, second) == ["0"]
    again = site[0] / f"daskrr-{second}.log"
    assert f"{job}: resume, since a job was stopped before it was done" in again.read_text()
    noise = log.read_text() + again.read_text()
    assert "Traceback" not in noise, noise
    np.testing.assert_array_equal(scores(site[0] / "once.zarr"), reference(site, landmarks=MANY_LANDMARKS))
    assert not list(site[0].glob(".daskrr*"))


def test_array__scores_every_store_of_a_list(site):
    for name in ("first", "second"):
        rows = np.random.default_rng(len(name)).standard_normal((1000, 3))
        zarr.create_array(site[0] / f"{name}.zarr", shape=rows.shape, chunks=(500, 3), dtype=rows.dtype)[:] = rows
    (site[0] / "stores.txt").write_text("first.zarr\nsecond.zarr\n")
    number = submit(site, "--array=1-2%2", "--cpus-per-task=1", "array.sh", "stores.txt")
    assert ended(site, number) == ["0", "0"], [one.read_text() for one in site[0].glob("daskrr-array-*.log")]
    for name in ("first", "second"):
        assert scores(site[0] / f"{name}-scores.zarr").shape == (1000,)


def test_job__of_the_recipe_has_no_mistake(site):
    code, output, complaints = run(site, "daskrr", "run", "--check", "job.toml")
    assert code == 0, complaints
    assert "points.zarr" in output
