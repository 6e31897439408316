"""A page about daskrr's jobs in the Dask dashboard, and the same facts as JSON.

A scheduler gets both from ``dask scheduler --preload daskrr.preload``, or as soon as a client computes with daskrr on
it. The page is at ``/daskrr``; without the bar on top it is at ``/individual-daskrr``, where the extension of
JupyterLab finds it; and the facts are at ``/json/daskrr.json``.
"""

import logging
from contextlib import suppress
from importlib import import_module
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from daskrr.apps.dashboard.state import Board
from daskrr.runtime.telemetry import TOPIC

log = logging.getLogger("daskrr")

NAME = "daskrr-dashboard"


class DashboardPlugin(SchedulerPlugin):
    """Reads the feed on the scheduler."""

    name = NAME
    idempotent = True

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.board = scheduler, Board()

    def catch_up(self) -> None:
        """Take what was told before the plugin was there: who a job is it says once, at its beginning."""
        for _, message in self.scheduler.get_events(TOPIC):
            with suppress(Exception):  # anyone may write under the topic
                self.board.take(message)
        for client in {job.client for job in self.board.jobs.values()} - self.scheduler.clients.keys():
            self.board.leave(client)

    def log_event(self, topic: str, msg: Any) -> None:
        """Take a message of the feed."""
        if topic == TOPIC:
            self.board.take(msg)

    def remove_client(self, scheduler: Any, client: str) -> None:
        """See what a client leaves behind."""
        self.board.leave(client)

    @property
    def limit(self) -> float:
        """Speed of matrix multiplies on all workers."""
        return self.board.limit({address: worker.nthreads for address, worker in self.scheduler.workers.items()})


def dask_setup(scheduler: Any) -> None:
    """Add the page to a scheduler; does nothing the second time."""
    if NAME in scheduler.plugins:
        return
    plugin = DashboardPlugin(scheduler)
    plugin.catch_up()
    scheduler.add_plugin(plugin, name=NAME)
    try:
        # Loaded here, since it needs inner parts of Dask and Bokeh that other versions may not have.
        import_module("daskrr.apps.dashboard.install").install(scheduler, plugin)
    except Exception as error:
        log.info("the dashboard has no page about daskrr: %s: %s", type(error).__name__, error)
