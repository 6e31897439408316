"""What differs between systems: each taken away here, to see what is done without it."""

import contextlib
import errno
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from daskrr import machine

# Fills memory of a megabyte again and again; how many pages were new after the first time.
FILLING = """
import resource, sys
from daskrr import machine
kept = len(sys.argv) > 1 and machine.keep_memory(1)
counts = []
for _ in range(20):
    bytearray(2**20)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(int(kept), counts[-1] - counts[0])
"""
# Frees all but a few of many pieces; MiB before, after tidying too early, and after tidying.
TIDYING = """
import psutil
from daskrr import machine
machine.keep_memory(1)
pieces = [bytearray(2**16) for _ in range(1000)]
pieces[:] = pieces[::50]
taken = [psutil.Process().memory_info().rss]
for seconds in (1e9, 0.0):
    machine.TIDY_SECONDS = seconds
    machine.tidy_memory()
    taken.append(psutil.Process().memory_info().rss)
print(*(one // 2**20 for one in taken), len(pieces))
"""
SLEEPER = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input ends."""
    process = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    with contextlib.suppress(BrokenPipeError):
        process.communicate()


@pytest.fixture
def without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path / "no proc")


def fail_with(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def wait_until_dead(process: subprocess.Popen[bytes]) -> None:
    """Until it has ended and nobody has asked how."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


# --- Time --------------------------------------------------------------------------------------------------------


def test_clock__counts_what_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(time, "clock_gettime", lambda which: asked.append(which) or 7.0)
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 1001, raising=False)
    monkeypatch.setattr(time, "CLOCK_MONOTONIC", 1002, raising=False)
    assert machine.clock() == 7.0
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    assert machine.clock() == 7.0
    monkeypatch.delattr(time, "CLOCK_MONOTONIC")
    before = time.monotonic()
    assert before <= machine.clock() <= time.monotonic()
    assert asked == [1001, 1002]


def test_clock__never_goes_back() -> None:
    seen = [machine.clock() for _ in range(1000)]
    assert seen == sorted(seen)


# --- Processes ---------------------------------------------------------------------------------------------------


def test_boot_id__is_the_same_in_every_process() -> None:
    script = "from daskrr import machine; print(machine.boot_id(), machine.process_namespace())"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == f"{machine.boot_id()} {machine.process_namespace()}".split()


@pytest.mark.usefixtures("without_proc")
def test_identity__is_unknown_rather_than_guessed() -> None:
    assert (machine.boot_id(), machine.process_namespace(), machine.process_start(os.getpid())) == ("", "", None)


def test_boot_id__of_macos_is_what_its_kernel_tells(without_proc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_sysctl", {"kern.bootsessionuuid": "BOOT"}.__getitem__)
    assert machine.boot_id() == "BOOT"


def test_process_start__tells_processes_of_one_number_apart(child: subprocess.Popen[bytes]) -> None:
    script = f"from daskrr import machine; print(machine.process_start({child.pid}))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(told.stdout) == machine.process_start(child.pid) >= machine.process_start(os.getpid())
    child.communicate()
    assert machine.process_start(child.pid) is None


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_is_gone__of_a_living_process_that_stays_alive(
    system: str, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if system == "nt":  # where any signal ends a process
        monkeypatch.setattr(machine.os, "kill", lambda *_: pytest.fail("a signal was sent"))
        monkeypatch.setattr(psutil, "pid_exists", {child.pid: True}.__getitem__)
    monkeypatch.setattr(machine.os, "name", system)
    found = machine.is_gone(child.pid)
    monkeypatch.undo()
    assert not found
    assert child.poll() is None


def test_is_gone__of_the_dead_and_the_unburied(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGKILL)
    wait_until_dead(child)
    assert machine.is_gone(child.pid)
    child.communicate()
    assert machine.is_gone(child.pid)


def test_is_gone__is_not_said_of_what_is_hidden(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(pid: int) -> None:
        raise psutil.NoSuchProcess(pid)

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", hidden)
        assert not machine.is_gone(child.pid)
        patch.setattr(machine.os, "kill", fail_with(errno.EPERM))
        assert not machine.is_gone(child.pid)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("processor: 0\nmodel name\t: AMD EPYC 9B14\nmodel name\t: another\n", "AMD EPYC 9B14"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n", " cpu implementer 0x41 cpu part 0xd40"),
    ],
)
def test_processor__is_named_or_numbered(told: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(machine, "PROC", tmp_path)
    assert machine.processor().endswith(name)


@pytest.mark.usefixtures("without_proc")
def test_processor__without_proc_is_never_empty() -> None:
    assert machine.processor()


# --- Files -------------------------------------------------------------------------------------------------------


def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked to go to the disk, from now on."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    return calls


def test_sync_file__of_macos_asks_for_the_disk_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = synced(monkeypatch)
    monkeypatch.setattr(machine.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(machine.fcntl, "fcntl", lambda *asked: calls.append(str(asked)))
    machine.sync_file(3)
    assert calls == ["(3, 51)"]
    monkeypatch.setattr(machine.fcntl, "fcntl", fail_with(errno.ENOTSUP))
    machine.sync_file(3)
    assert calls == ["(3, 51)", "fsync"]


def test_sync_file__does_without_fcntl(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = synced(monkeypatch)
    monkeypatch.setattr(machine, "fcntl", None)
    machine.sync_file(3)
    assert calls == ["fsync"]


def test_sync_file__tells_that_the_disk_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        machine.sync_file(3)


def test_sync_folder__where_it_can_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = synced(monkeypatch)
    machine.sync_folder(tmp_path)
    assert calls == ["fsync"]
    monkeypatch.setattr(os, "fsync", fail_with(errno.EINVAL))
    machine.sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        machine.sync_folder(tmp_path)
    monkeypatch.delattr(os, "O_DIRECTORY")
    machine.sync_folder(tmp_path)


NO_LINK = {
    "links": lambda patch: None,
    "no call": lambda patch: patch.delattr(os, "link"),
    "refused": lambda patch: patch.setattr(os, "link", fail_with(errno.EPERM)),
}


@pytest.mark.parametrize("way", NO_LINK)
def test_link_new__gives_a_name_once(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NO_LINK[way](monkeypatch)
    first, second, target = tmp_path / "first", tmp_path / "second", tmp_path / "target"
    first.write_text("first")
    second.write_text("second")
    assert machine.link_new(str(first), str(target))
    assert not machine.link_new(str(second), str(target))
    assert (target.read_text(), second.read_text(), first.exists()) == ("first", "second", way == "links")


@pytest.mark.parametrize("way", NO_LINK)
def test_link_new__tells_what_is_missing(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    NO_LINK[way](monkeypatch)
    with pytest.raises(FileNotFoundError, match="nothing"):
        machine.link_new(str(tmp_path / "nothing"), str(tmp_path / "target"))


def test_link_new__without_any_way_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "link")
    monkeypatch.setattr(machine, "_rename_new", fail_with(errno.EINVAL))
    with pytest.raises(machine.NoHardLinks, match="no hard links, nor another way"):
        machine.link_new(str(tmp_path / "first"), str(tmp_path / "target"))


def test_make_link__is_relative_and_replaces_a_link(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "made" / name).mkdir(parents=True)
        assert machine.make_link(str(tmp_path / "made" / name), str(tmp_path / "link"))
        assert os.readlink(tmp_path / "link") == f"made/{name}"
    assert sorted(os.listdir(tmp_path)) == ["link", "made"]


def test_make_link__leaves_a_folder_alone(tmp_path: Path) -> None:
    for name in ("target", "users"):
        (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError, match="users"):
        machine.make_link(str(tmp_path / "target"), str(tmp_path / "users"))
    assert sorted(os.listdir(tmp_path)) == ["target", "users"]


@pytest.mark.parametrize(
    "take_away",
    [
        lambda patch: patch.delattr(os, "symlink"),
        lambda patch: patch.setattr(os, "symlink", fail_with(errno.EPERM)),
    ],
)
def test_make_link__is_false_where_there_are_none(
    take_away: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch)
    assert not machine.make_link(str(tmp_path), str(tmp_path / "link"))
    assert os.listdir(tmp_path) == []


# --- Memory ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library can be told what to keep")
def test_keep_memory__has_memory_used_again_that_dask_would_give_back() -> None:
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "65536"}
    told = [
        subprocess.check_output([sys.executable, "-c", FILLING, *more], env=environment, text=True, timeout=120).split()
        for more in ([], ["keep"])
    ]
    assert [kept for kept, _ in told] == ["0", "1"]
    as_dask_has_it, kept = (int(pages) for _, pages in told)
    assert kept < as_dask_has_it / 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only the GNU C library can be told what to give back")
def test_tidy_memory__gives_back_what_lies_between_what_is_in_use() -> None:
    told = subprocess.check_output([sys.executable, "-c", TIDYING], text=True, timeout=120)
    before, too_early, after, kept = map(int, told.split())
    assert (too_early, kept) == (before, 20)
    assert after < before - 40


@pytest.mark.parametrize(
    ("system", "known", "asked"), [("linux", True, [0]), ("linux", False, []), ("darwin", True, [])]
)
def test_tidy_memory__asks_the_library_of_linux_alone_if_it_can(
    system: str, known: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    library = SimpleNamespace(malloc_trim=found.append) if known else object()
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(machine, "TIDY_SECONDS", 0.0)
    machine.tidy_memory()
    assert found == asked


def test_keep_memory__does_nothing_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.keep_memory(1) is False
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: object())
    assert machine.keep_memory(1) is False


@pytest.fixture
def asks_again() -> Iterator[None]:
    """What was told of the GPU is forgotten before and after."""
    machine.gpu.cache_clear()
    yield
    machine.gpu.cache_clear()


class Driver:
    """What the driver of NVIDIA answers, with a GPU or without."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            if name == "cuDeviceGetName":
                arguments[0].value = b"Made-up 1"  # type: ignore[attr-defined]
            elif name == "cuDeviceTotalMem_v2":
                arguments[0]._obj.value = 2**34  # type: ignore[attr-defined]
            return 100 if name == self.failing else 0

        return call


@pytest.mark.usefixtures("asks_again")
def test_gpu__is_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Driver())
    assert machine.gpu() == machine.Gpu("Made-up 1", 2**34)


@pytest.mark.usefixtures("asks_again")
@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceTotalMem_v2", "no driver"])
def test_gpu__is_none_where_the_driver_has_none(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Driver:
        if failing == "no driver":
            raise OSError(name)
        return Driver(failing)

    monkeypatch.setattr(machine.ctypes, "CDLL", load)
    assert machine.gpu() is None


@pytest.mark.parametrize(
    ("visible", "gpus", "seen"),
    [
        (None, 0, [None, None, None]),
        (None, 2, ["0", "1", ""]),
        ("4,7", 8, ["4", "7", ""]),
        ("", 2, ["", "", ""]),
        ("3", 8, ["3", "", ""]),
    ],
)
def test_use_one_gpu__gives_each_process_one_and_none_to_those_that_are_left(
    visible: str | None, gpus: int, seen: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(gpus):
        (tmp_path / f"driver/nvidia/gpus/{number}").mkdir(parents=True)
    monkeypatch.setattr(machine, "PROC", tmp_path)
    found = []
    for number in range(3):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine.use_one_gpu(number)
        found.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert found == seen
