"""What differs between operating systems, in one place; where a system cannot do something, less is promised, and said.

What a system lacks is found out when it is needed, so that a file system, and not only a system, may lack it.
"""

import contextlib
import ctypes
import errno
import os
import platform
import secrets
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PROC = Path("/proc")
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
NOT_FOR_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
# Of the C library of Linux, and of that of macOS.
AT_FDCWD, RENAME_NOREPLACE = -100, 1
RENAME_EXCL = 4
# Options of the memory of the C library of Linux. Larger pieces than the first cannot be kept.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX = -3, -1, -8
LARGEST_KEPT, MOST_KEPT = 32 * 2**20, 128 * 2**20

# How often pages without content go back, and when this process has done so last.
TIDY_SECONDS = 3.0
_TIDIED = deque([time.monotonic()], maxlen=1)


class NoHardLinks(OSError):
    """A file system that can neither link nor move a file to a name without the risk of replacing what is there."""


def clock() -> float:
    """Seconds that never go back and go on while the machine sleeps, from a start of its own.

    CLOCK_BOOTTIME on Linux. On macOS CLOCK_MONOTONIC counts sleep, as Python's own clock, the one that is left on
    Windows, does there; on a system that has neither, a sleep may not be counted.
    """
    for name in ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC"):
        if hasattr(time, name):
            return time.clock_gettime(getattr(time, name))
    return time.monotonic()


def boot_id() -> str:
    """What names the time since this very machine was started, on Linux and macOS.

    Elsewhere it is "", "unknown": the only trace is a time of day, which moves when the clock is set, and would have
    a living process taken for one of an earlier boot.
    """
    return _told(PROC / "sys/kernel/random/boot_id").strip() or _sysctl("kern.bootsessionuuid")


def process_namespace() -> str:
    """What names the numbering of processes that this one is in; "" where there is but one."""
    with contextlib.suppress(OSError):
        return os.readlink(PROC / "self/ns/pid")
    return ""


def process_start(pid: int) -> int | None:
    """When a process was started, in ticks since the boot; None if it is hidden or gone.

    None on any system but Linux: they tell it by a clock that can be set. A number that was given to another process
    meanwhile is not noticed there.
    """
    # The name of a process, in parentheses, may hold anything.
    fields = _told(PROC / f"{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if fields else None


def is_gone(pid: int) -> bool:
    """Whether no process has this number, or only one that waits to be buried; False where that is hidden from us."""
    if os.name != "posix":  # a signal, also number 0, ends a process on Windows
        return not psutil.pid_exists(pid)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with contextlib.suppress(psutil.Error, OSError):
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def processor() -> str:
    """What people call the processor; where nobody has named it, its architecture and the numbers of its maker."""
    told = [line.partition(":") for line in _told(PROC / "cpuinfo").splitlines()]
    facts = {name.strip().lower(): value.strip() for name, _, value in reversed(told)}
    numbers = [f"{name} {facts[name]}" for name in ("cpu implementer", "cpu part") if name in facts]
    named = facts.get("model name") or _sysctl("machdep.cpu.brand_string")
    return named or " ".join([platform.processor() or platform.machine(), *numbers])


@dataclass(frozen=True)
class Gpu:
    """A GPU: what its maker calls it, and the bytes of its memory."""

    name: str
    memory: int


@cache
def gpu() -> Gpu | None:
    """The first GPU of NVIDIA that this process may use, as the driver tells; None where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    calls: list[tuple[Any, ...]] = [
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), 0),
        (driver.cuDeviceGetName, name, len(name), device),
        (driver.cuDeviceTotalMem_v2, ctypes.byref(memory), device),
    ]
    # The arguments of a call are those that the ones before it have filled in.
    if any(call(*arguments) for call, *arguments in calls):
        return None
    return Gpu(name.value.decode(errors="replace"), memory.value)


def visible_gpus() -> list[str]:
    """What names the GPUs that this process may use; none on a system whose driver does not list them."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    if known is not None:
        return [one for one in known.split(",") if one]
    try:
        return [str(number) for number, _ in enumerate((PROC / "driver/nvidia/gpus").iterdir())]
    except OSError:
        return []


def use_one_gpu(number: int) -> None:
    """Have this process, which has asked for no GPU yet, see that of its number alone, or none if there are fewer."""
    if gpus := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number] if number < len(gpus) else ""


def sync_file(descriptor: int) -> None:
    """Have the content of an open file survive a loss of power.

    What macOS calls fsync ends in the cache of the disk, so that it is asked for more; where a file system cannot do
    that, only what the system itself could lose is safe.
    """
    to_the_disk = getattr(fcntl, "F_FULLFSYNC", None)
    if to_the_disk is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, to_the_disk)
            return
    os.fsync(descriptor)


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Have the names in a folder survive a loss of power.

    Nothing is done where a folder cannot be opened, as on Windows, or not be synchronized, as on some file systems of
    a network: a name that was given last may be lost with the power there, and the one before it is seen.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in NOT_FOR_FOLDERS:
            raise
    finally:
        os.close(folder)


def link_new(existing: str, target: str) -> bool:
    """Put a finished file at a name that nothing has yet, at once and whole; False if the name is taken.

    The file keeps its old name where there are hard links. Where there are none, it is moved, by a call that does not
    replace anything.

    Raises
    ------
    NoHardLinks
        There is no such call either.
    """
    try:
        os.link(existing, target)
    except FileExistsError:
        return False
    except (AttributeError, NotImplementedError):
        return _move_new(existing, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _move_new(existing, target)
    return True


def _move_new(existing: str, target: str) -> bool:
    try:
        _rename_new(existing, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        raise NoHardLinks(
            error.errno, "there are no hard links, nor another way to give a file a name that nothing has", target
        ) from None
    return True


def _rename_new(existing: str, target: str) -> None:
    """Rename a file unless the new name is taken; Python knows this of Windows alone."""
    if os.name == "nt":
        os.rename(existing, target)
        return
    names = os.fsencode(existing), os.fsencode(target)
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):
        failed = library.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_NOREPLACE)
    elif hasattr(library, "renamex_np"):
        failed = library.renamex_np(*names, RENAME_EXCL)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), existing)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), existing, None, target)


def make_link(target: str, link: str) -> bool:
    """Have the path ``link`` lead to ``target``, at once and in place of another link; relative, so that both can move.

    False where there are no symbolic links, and on Windows, where they take a right that few have and cannot be
    replaced at once.
    """
    if os.name == "nt" or not hasattr(os, "symlink"):
        return False
    temporary = f"{link}+{secrets.token_hex(8)}"
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(link)), temporary)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return False
    try:
        os.replace(temporary, link)
    except OSError:
        os.unlink(temporary)
        raise
    return True


def keep_memory(arenas: int) -> bool:
    """Have this process keep memory that is freed for what needs it next, in so many arenas; False where it cannot.

    Dask has its workers give freed memory back at once, so that every chunk is decoded into pages that are new. A new
    page takes some microseconds in a virtual machine, as long as thousands of multiplications. Only the GNU C library
    can be told; elsewhere things stay as they are.
    """
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    options = ((M_MMAP_THRESHOLD, LARGEST_KEPT), (M_TRIM_THRESHOLD, MOST_KEPT), (M_ARENA_MAX, arenas))
    return all(library.mallopt(*one) for one in options)


def tidy_memory() -> None:
    """Give pages that hold nothing back to the system, every few seconds, where :func:`keep_memory` works.

    What is freed is kept for what comes next. Pieces of it lie between what is in use, in ever more pages.
    """
    if time.monotonic() - _TIDIED[-1] < TIDY_SECONDS:
        return
    _TIDIED.append(time.monotonic())
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _told(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _sysctl(name: str) -> str:
    """What the kernel of macOS tells by this name; "" anywhere else."""
    if sys.platform != "darwin":
        return ""
    ask = ctypes.CDLL(None).sysctlbyname
    answer, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    failed = ask(name.encode(), answer, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else answer.value.decode(errors="replace").strip()
