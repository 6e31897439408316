"""What a page of the Dask dashboard is fed with: small messages from the client and the workers to the scheduler.

They are events of Dask under one topic, which any scheduler takes, also one that has no page and no daskrr. Nothing in
them grows with the rows, nobody waits for them, and no failure to send one fails a job.
"""

import threading
import time
import uuid
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import asdict
from typing import Any, Self

import distributed
import numpy as np
from numpy.typing import NDArray

from daskrr.kernels.device import Device, current
from daskrr.numerics import blas, histogram
from daskrr.runtime import progress
from daskrr.runtime.notebook import in_notebook, notebook_display
from daskrr.runtime.progress import Display, Event, Reporter
from daskrr.storage.urls import redact

TOPIC = "daskrr"
# Least seconds between two messages about one stage.
EVERY = 0.5
# How long the end of a job may wait until the scheduler knows of it.
LONGEST_GOODBYE = 2.0
# Multiplies of these sizes come near the speed of larger ones and take about a hundredth of a second.
MATMUL_SIZE, GPU_MATMUL_SIZE = 512, 4096
# What part of the time may be spent on measuring.
MATMUL_SHARE = 0.002
_speeds: dict[tuple[str, str], tuple[float, float]] = {}
_measuring = threading.Lock()
_current: ContextVar["Feed | None"] = ContextVar("daskrr-feed", default=None)


def reporter(told: Reporter | bool | None = None) -> Display:
    """Choose where events go, as :func:`daskrr.runtime.progress.reporter` does, and have the scheduler know them too.

    None and True show a widget in a notebook. Within a call that feeds the scheduler already, nothing is told twice.
    """
    if isinstance(told, Feed):
        return progress.Relay(told)
    display = notebook_display() if told in (None, True) and in_notebook() else progress.reporter(told)
    client = None if _current.get() else _running_client()
    return display if client is None else Feed(display, client)


def note(**facts: Any) -> None:
    """Tell the scheduler facts about the job that is under way, if it is told anything."""
    feed = _current.get()
    if feed is not None:
        feed.send(facts=facts)


def _running_client() -> Any:
    try:
        client = distributed.get_client()
    except ValueError:
        return None
    return client if client.status == "running" else None


class Feed(Display):
    """Hands events on to another display, and tells the scheduler of them now and then, and how it all ended."""

    def __init__(self, display: Display, client: Any) -> None:
        self._display, self._client = display, client
        self._job, self._order, self._next = uuid.uuid4().hex, 0, 0.0
        self._token: Token | None = None

    def __call__(self, event: Event) -> None:
        """Send the event if it is time, and hand it on."""
        now = time.monotonic()
        if event.done == 0 or event.ended or now >= self._next:
            self._next = now + EVERY
            self.send(event=asdict(event))
        self._display(event)

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        self.send(state="running")
        return self

    def __exit__(self, *failure: Any) -> None:
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        self.close()
        self._say_goodbye(*failure[:2])

    def close(self) -> None:
        """Put the display away."""
        self._display.close()

    def send(self, **facts: Any) -> None:
        """Have a message on its way to the scheduler; nobody waits for it."""
        with suppress(Exception):
            self._client.loop.add_callback(_tell, self._client, self._message(facts))

    def _say_goodbye(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        state = "done" if kind is None else "failed" if issubclass(kind, Exception) else "interrupted"
        text = "" if kind is None else redact(f"{kind.__name__}: {error}".removesuffix(": "))
        with suppress(Exception):
            if self._client.status == "running":
                message = self._message({"state": state, "error": text})
                self._client.sync(_tell, self._client, message, callback_timeout=LONGEST_GOODBYE)

    def _message(self, facts: dict[str, Any]) -> dict[str, Any]:
        self._order += 1
        return {"job": self._job, "client": self._client.id, "order": self._order, "at": time.time()} | facts


async def _tell(client: Any, message: dict[str, Any]) -> None:
    with suppress(Exception):
        await client.scheduler.log_event(topic=TOPIC, msg=message)


def count(kind: str, run: str, start: int, values: NDArray, dtype: np.dtype) -> None:
    """Tell the scheduler, from a task on a worker, how large the values of the rows from ``start`` on are.

    ``dtype`` is that of the tiles they were computed in.
    """
    try:
        worker = distributed.get_worker()
    except ValueError:
        return
    with suppress(Exception):
        message = {
            "run": run, "kind": kind, "start": int(start), "counts": histogram.octaves(values).tolist(),
            "worker": worker.address, "speed": matmul_speed(str(dtype)),
        }  # fmt: skip
        worker.log_event(TOPIC, message)


def matmul_speed(dtype: str) -> float:
    """Operations per second of a matrix multiply on one thread, or on the GPU, of this process: the best measured.

    Other programs slow a measurement down, so there is another now and then, as often as costs next to nothing. One
    thread makes it; others know no speed, 0, before the first.
    """
    device = current()
    size = MATMUL_SIZE if device.is_host else GPU_MATMUL_SIZE
    best, due = _speeds.get((device.name, dtype), (0.0, 0.0))
    if time.monotonic() >= due and _measuring.acquire(blocking=False):
        try:
            seconds = _multiply(device, size, dtype)
        finally:
            _measuring.release()
        best = max(best, 2.0 * size**3 / seconds)
        _speeds[device.name, dtype] = best, time.monotonic() + seconds / MATMUL_SHARE
    return best


def _multiply(device: Device, size: int, dtype: str) -> float:
    """Seconds of one multiply, until a part of its result is here."""
    A = device.empty((size, size), dtype)
    A[...] = 0.5
    with blas.one_thread():
        device.get(A[:256] @ A[:, :256])  # what a first call takes besides
        began = time.perf_counter()
        device.get((A @ A)[:1])
        return time.perf_counter() - began
