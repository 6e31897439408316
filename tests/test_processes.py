"""Signals that come too late, when a process has ended by itself between the look and the signal."""

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from processes import stop_when, stopped

FOREVER = "import time; print('ready', flush=True); time.sleep(3600)"
ASKED = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); " + FOREVER


def python(program: str, *arguments: object) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip


def wait_for_the_end(process: subprocess.Popen[str]) -> None:
    """Until a process has ended that its parent still believes to run."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process.returncode is None


@pytest.mark.parametrize("whole_group", [False, True])
def test_stopped__tells_a_killed_process_from_one_that_ended_before_the_kill(whole_group: bool) -> None:
    with python(FOREVER) as process:
        process.stdout.readline()
        assert stopped(process, whole_group=whole_group) == ""
    with python("") as process:
        wait_for_the_end(process)
        assert stopped(process, whole_group=whole_group) is None
    with python("") as process:
        process.wait()
        assert stopped(process, whole_group=whole_group) is None


def test_stopped__gives_the_complaints_of_a_process_that_was_asked_to_end() -> None:
    with python(f"import sys; sys.stderr.write('going'); {ASKED}") as process:
        process.stdout.readline()
        assert stopped(process, signal.SIGTERM, 143) == "going"


def test_stopped__fails_for_a_process_that_failed_by_itself() -> None:
    with python("raise SystemExit('broken')") as process:
        wait_for_the_end(process)
        with pytest.raises(AssertionError, match="exit code 1: broken"):
            stopped(process)


def test_stop_when__starts_again_what_ended_before_it_could_be_stopped(tmp_path: Path) -> None:
    output, programs = tmp_path / "out", ["", "", FOREVER]

    def start() -> AbstractContextManager[subprocess.Popen[str]]:
        process = python(f"import os, sys; os.mkdir(sys.argv[1]); {programs.pop(0)}", output)
        if programs:
            wait_for_the_end(process)
        return process

    stop_when(output.exists, start, output)
    assert programs == []
    assert output.exists()


def test_stop_when__starts_again_what_was_stopped_after_the_moment(tmp_path: Path) -> None:
    output, answers = tmp_path / "out", [True, False, True, True]

    def start() -> AbstractContextManager[subprocess.Popen[str]]:
        output.mkdir()
        return python(FOREVER)

    stop_when(lambda: answers.pop(0), start, output)
    assert answers == []
