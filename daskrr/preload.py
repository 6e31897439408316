"""The address for Dask's ``--preload``: ``dask scheduler --preload daskrr.preload`` and ``dask worker --preload …``.

A scheduler does the p × p algebra of jobs then, where clients may not register plugins themselves, and has their page
in its dashboard from its start. A worker has imported what tasks need before the first is assigned, and keeps the
memory of one for the next.
"""

from importlib import import_module
from typing import Any

from distributed import Scheduler

from daskrr.runtime.scheduler import FactorPlugin
from daskrr.runtime.workers import LossPlugin, settle_in


async def dask_setup(server: Any) -> None:
    """Make a starting scheduler or worker ready."""
    if isinstance(server, Scheduler):
        for plugin in (FactorPlugin(), LossPlugin()):
            await server.register_scheduler_plugin(plugin, idempotent=True)
    else:
        import_module("daskrr.leverage")
        settle_in(server)
