"""How the page comes into a dashboard that runs.

Dask and Bokeh have no public way to add one. Everything that is used of their inner parts is named here; where one is
not as expected, :func:`install` raises, and the dashboard stays as it was but for what was added before.
"""

from collections.abc import Callable, Collection
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.server.contexts import ApplicationContext
from bokeh.server.tornado import BokehTornado
from bokeh.server.urls import per_app_patterns
from bokeh.server.util import check_allowlist
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.scheduler import template_variables
from distributed.http.utils import RequestHandler
from tornado import web

from daskrr.apps.dashboard.view import Page

EVERY_MILLISECONDS = 500


class SameSite(web.RequestHandler):
    """Refuses browsers that another site has sent; programs, which tell no origin, and our own pages pass.

    Dask takes any origin and any host, since it cannot know by which name a proxy is reached. Neither do we, unless its
    ``allow_websocket_origin`` tells; but a page and what it opens have the same.
    """

    allowed: Collection[str] = ("*",)

    async def prepare(self) -> None:
        """Decide before anything else is done, for pages, scripts and web sockets alike."""
        headers = self.request.headers
        forwarded = headers.get("X-Forwarded-Host", self.request.host)  # no browser lets another site set it
        hosts = {self.request.host.lower(), forwarded.lower()}
        if not is_same_site(headers.get("Origin"), hosts, self.allowed):
            raise web.HTTPError(403)
        waiting = super().prepare()
        if waiting is not None:
            await waiting


def is_same_site(origin: str | None, hosts: Collection[str], allowed: Collection[str]) -> bool:
    """Whether a request comes from a page of the hosts that it asks, itself and through a proxy.

    If ``allowed`` has no wildcard, these are also hosts in it, or addresses: a name of somebody else may lead here.
    """
    site = None if origin is None else urlsplit(origin).netloc.lower()
    if any("*" in one for one in allowed):
        return site is None or site in hosts
    known = all(_is_address(host) or check_allowlist(host, list(allowed)) for host in hosts)
    return known and (site is None or site in hosts or check_allowlist(site, list(allowed)))


def _is_address(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    try:
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def guarded(handler: type[Any], allowed: Collection[str]) -> type[Any]:
    """The same handler for requests from the same site only."""
    return type(handler.__name__, (SameSite, handler), {"allowed": allowed})


class JobFacts(RequestHandler):
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
    facts = guarded(JobFacts, servers[0].websocket_origins if servers else SameSite.allowed)
    scheduler.http_application.add_handlers(
        ".*", [(f"{prefix}/json/daskrr.json", facts, {"extra": {"plugin": plugin}})]
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
    routes = [
        (f"{server.prefix}{url}{pattern[0]}", guarded(pattern[1], server.websocket_origins), about)
        for pattern in per_app_patterns
    ]
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
