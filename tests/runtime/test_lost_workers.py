"""What is asked of workers before work starts, and that those which are lost are told."""

import logging
import os
import signal
import threading

import numpy as np
import pytest
from distributed import Client

from daskrr.apps.clusters import local_cluster
from daskrr.runtime.rows import open_rows
from daskrr.runtime.workers import ask


class Awaited(logging.Handler):
    """Keeps what is logged of lost workers, and tells when there is something."""

    def __init__(self):
        super().__init__()
        self.lines, self.came = [], threading.Event()

    def emit(self, record):
        if "was lost" in record.getMessage():
            self.lines.append(record.getMessage())
            self.came.set()


@pytest.mark.slow
def test_ask__has_a_worker_that_dies_told_and_none_that_is_told_to_go(tmp_path):
    def die_once(path):
        if not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    log, heard = logging.getLogger("daskrr"), Awaited()
    log.addHandler(heard)
    try:
        with local_cluster(3, "1GiB") as cluster, Client(cluster) as client:
            ask(client, open_rows(np.ones((5, 2))), "cpu")
            retired, victim, _ = client.nthreads()
            client.retire_workers([retired])
            where = {"workers": [victim], "allow_other_workers": True}
            assert client.submit(die_once, tmp_path / "died", **where).result() == "done"
            assert heard.came.wait(60)
    finally:
        log.removeHandler(heard)
    assert heard.lines == [
        f"worker {victim} was lost: it died, or cannot be reached. What it was at or alone knew runs again elsewhere: "
        "1 task."
    ]
