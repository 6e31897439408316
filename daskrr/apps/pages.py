"""How the page comes into a dashboard that runs.

Dask and Bokeh have no public way to add one. Everything that is used of their inner parts is named here; where one is
not as expected, :func:`install` raises, and the dashboard stays as it was but for what was added before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.server.contexts import ApplicationContext
from bokeh.server.tornado import BokehTornado
from bokeh.server.urls import per_app_patterns
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.scheduler import template_variables
from distributed.http.utils import RequestHandler

from daskrr.apps.page import Page

EVERY_MILLISECONDS = 500


class Facts(RequestHandler):
    """The jobs as JSON, the one to look at first."""

    def get(self) -> None:
        """Answer a request."""
        plugin = self.extra["plugin"]
        board, limit = plugin.board, plugin.limit
        jobs = sorted(board.jobs.values(), key=lambda job: job is not board.current)
        self.write({"jobs": [job.to_dict(limit) for job in jobs]})


def install(scheduler: Any, plugin: Any) -> None:
    """Add the facts, the pages and the entry in the menu to the HTTP server of a scheduler."""
    servers = [one for one in scheduler.http_application.applications if isinstance(one, BokehTornado)]
    prefix = servers[0].prefix if servers else ""
    scheduler.http_application.add_handlers(
        ".*", [(f"{prefix}/json/daskrr.json", Facts, {"extra": {"plugin": plugin}})]
    )
    for server in servers:
        extra = {"prefix": f"{prefix}/", **template_variables(scheduler)}
        for url, show in (("/daskrr", show_framed), ("/individual-daskrr", show_bare)):
            _add_page(server, url, partial(show, plugin, extra))
        _add_to_menu(template_variables(scheduler))


def _add_page(server: Any, url: str, show: Callable[[Any], None]) -> None:
    """Add a Bokeh application to a server that runs, as its constructor would have."""
    context = ApplicationContext(Application(FunctionHandler(show)), url=url)
    context._loop = server._loop
    server._applications[url] = context
    about = {"application_context": context, "bokeh_websocket_path": f"{server.prefix}{url}/ws"}
    routes = [(f"{server.prefix}{url}{pattern[0]}", pattern[1], about) for pattern in per_app_patterns]
    server.add_handlers(".*", routes)


def _add_to_menu(variables: dict[str, Any]) -> None:
    """Name the page in the bar on top of all pages, which share these lists."""
    variables["pages"].insert(1, "daskrr")
    variables["plots"].append({"url": "individual-daskrr", "name": "Daskrr"})
    variables["plots"].sort(key=lambda plot: plot["name"])


def show_bare(plugin: Any, extra: dict[str, Any], doc: Any) -> None:
    """The page by itself, as the extension of JupyterLab shows it."""
    page = Page()

    def update() -> None:
        page.update(plugin.board, plugin.limit)

    update()
    doc.add_root(page.root)
    doc.title = "Dask: daskrr"
    doc.theme = BOKEH_THEME
    doc.add_periodic_callback(update, EVERY_MILLISECONDS)


def show_framed(plugin: Any, extra: dict[str, Any], doc: Any) -> None:
    """The page under the bar that all pages of the dashboard have."""
    show_bare(plugin, extra, doc)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
