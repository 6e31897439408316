"""The nightly job under cron and systemd: a real cron runs the entry of deploy/cron, systemd verifies its units.

Paths, user and hour of the entry are replaced by those of the test; everything else is as it is shipped.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

import daskrr

pytestmark = pytest.mark.deploy

GENEROUS = 240
CRON = Path(__file__).parents[2] / "deploy" / "cron"
SYSTEMD = CRON.parent / "systemd"
COMMAND = Path(sys.executable).with_name("daskrr")
# A cron that sees the entry of the test alone, and whose jobs end with it.
ISOLATED = """
mount --bind "$1/cron.d" /etc/cron.d && mount --bind "$1/crontab" /etc/crontab || exit
mount --bind "$1/spool" /var/spool/cron/crontabs && mount -t tmpfs tmpfs /run || exit
exec cron -f
"""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Points, the job file and the environment file of deploy/cron, all in one folder."""
    X = np.random.default_rng(0).standard_normal((1000, 3))
    zarr.create_array(tmp_path / "points.zarr", shape=X.shape, chunks=(500, 3), dtype=X.dtype)[:] = X
    (tmp_path / "job.toml").write_text(replaced(CRON / "job.toml", {"/var/lib/daskrr": str(tmp_path)}))
    settings = (CRON / "daskrr.env").read_text() + f"PYTHONPATH={Path(daskrr.__file__).parents[1]}\n"
    (tmp_path / "daskrr.env").write_text(settings)
    return tmp_path


def replaced(file: Path, changes: dict[str, str]) -> str:
    """The text of a file with changes, each of which has to change something."""
    text = file.read_text()
    for old, new in changes.items():
        assert old in text, f"{file} does not say {old}"
        text = text.replace(old, new)
    return text


def entry(folder: Path) -> str:
    """The crontab, for every minute."""
    return replaced(
        CRON / "daskrr",
        {
            "17 2 * * *  daskrr ": "* * * * *  root ",
            "/opt/daskrr/bin": str(COMMAND.parent),
            "/var/lib/daskrr": str(folder),
            "/etc/daskrr/": f"{folder}/",
        },
    )


@contextlib.contextmanager
def cron(folder: Path) -> Iterator[subprocess.Popen]:
    """A cron with one crontab; it and its jobs are gone in the end."""
    for name in ("cron.d", "spool"):
        (folder / name).mkdir()
    (folder / "crontab").write_text("")
    (folder / "cron.d" / "daskrr").write_text(entry(folder))
    spaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen([*spaces, "sh", "-c", ISOLATED, "sh", str(folder)], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=GENEROUS)


def wait_for(text: str, log: Path, process: subprocess.Popen) -> str:
    """The log as soon as it holds a text."""
    deadline = time.monotonic() + GENEROUS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"cron ended with {process.returncode}: {process.communicate()[1]}")
        if log.exists() and text in log.read_text():
            return log.read_text()
        time.sleep(0.2)
    raise AssertionError(f"no {text!r} in {GENEROUS} s, but: {log.read_text() if log.exists() else 'no log'}")


@pytest.mark.skipif(shutil.which("cron") is None, reason="needs cron")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a cron")
def test_cron__runs_the_job_and_publishes_its_scores(folder: Path) -> None:
    with cron(folder) as process:
        log = wait_for("exit code", folder / "nightly.log", process)
    assert "exit code 0, 20" in log, log
    scores = daskrr.open_scores(str(folder / "scores.zarr"))
    assert scores["scores"].shape == (1000,)
    assert (scores["lower"][:] <= scores["upper"][:]).all()


def nightly(folder: Path) -> str:
    """Run the command of the entry once, in the bare environment that cron gives; the log."""
    *settings, line = [line for line in entry(folder).splitlines() if not line.startswith("#")]
    environment = dict(setting.split("=", 1) for setting in settings) | {"HOME": str(folder), "LOGNAME": "root"}
    command = line.split(None, 6)[6]
    assert "%" not in command, "cron takes % for the end of a line"
    subprocess.run([environment["SHELL"], "-c", command], env=environment, check=True, timeout=GENEROUS)
    return (folder / "nightly.log").read_text()


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_cron__leaves_a_run_alone_that_goes_on_and_says_what_failed(folder: Path) -> None:
    with (folder / "nightly.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "exit code 5, 20" in nightly(folder)
    shutil.move(folder / "points.zarr", folder / "elsewhere.zarr")
    log = nightly(folder)
    assert "points.zarr" in log
    assert "exit code 2, 20" in log
    assert not (folder / "scores.zarr").exists()


def verified(folder: Path, changes: dict[str, str]) -> subprocess.CompletedProcess:
    """What systemd says of the units after changes."""
    service = replaced(SYSTEMD / "daskrr.service", {"/opt/daskrr/bin/daskrr": str(COMMAND)} | changes)
    (folder / "daskrr.service").write_text(service)
    shutil.copy(SYSTEMD / "daskrr.timer", folder)
    units = [str(folder / "daskrr.service"), str(folder / "daskrr.timer")]
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, timeout=GENEROUS, check=False
    )


@needs_systemd
def test_systemd__accepts_the_units(tmp_path: Path) -> None:
    done = verified(tmp_path, {})
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ProtectSystem=": "ProtectSytem="}, "ProtectSytem"),
        ({"Type=oneshot": "Type=once"}, "once"),
        ({"SystemCallFilter=@system-service": "SystemCallFilter=@sytem-service"}, "@sytem-service"),
        ({"ExecStart=": "ExecStart=/nowhere"}, "nowhere"),
        ({"TimeoutStartSec=6h": "TimeoutStartSec=6 hurs"}, "6 hurs"),
    ],
)
def test_systemd__finds_planted_mistakes(tmp_path: Path, changes: dict[str, str], named: str) -> None:
    done = verified(tmp_path, changes)
    assert named in done.stdout + done.stderr


@needs_systemd
def test_systemd__comes_once_a_night() -> None:
    (times,) = [
        line.partition("=")[2]
        for line in (SYSTEMD / "daskrr.timer").read_text().splitlines()
        if line.startswith("OnCalendar=")
    ]
    command = ["systemd-analyze", "calendar", "--iterations=3", "--base-time=2026-01-01 00:00:00 UTC", times]
    said = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS, check=True, env={"TZ": "UTC"})
    assert [f"2026-01-0{day} 02:17:00 UTC" in said.stdout for day in (1, 2, 3)] == [True] * 3
    wrong = subprocess.run([*command[:-1], "*-*-* 25:17"], capture_output=True, timeout=GENEROUS, check=False)
    assert wrong.returncode != 0


@needs_systemd
def test_systemd__shuts_the_job_in(tmp_path: Path) -> None:
    verified(tmp_path, {})
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(tmp_path / "daskrr.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS, check=False)
    assert done.returncode == 0, done.stdout
