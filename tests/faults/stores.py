"""Stores that fail, lie and cut off: a proxy before an S3 server, and a Zarr store of a user.

What fails is decided by the name of the object and how often it was asked for, so that neither threads nor processes
change it.
"""

import collections
import http.client
import os
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from zarr.storage import LocalStore, WrapperStore

ASKED = collections.Counter()


class Plan:
    """Which requests fail and how: a share of those for all names, or for those that contain ``only``."""

    def __init__(self, kinds, share=0.05, seed=0, only=""):
        self.kinds, self.share, self.seed, self.only = kinds, share, seed, only
        self.log = None

    def fault(self, name):
        """The kind of failure of this request, if it fails."""
        if self.only not in name:
            return None
        ASKED[name, id(self)] += 1
        chance = zlib.crc32(f"{self.seed} {name} {ASKED[name, id(self)]}".encode())
        if chance >= self.share * 2**32:
            return None
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(name + "\n")
        return self.kinds[chance % len(self.kinds)]


class Proxy:
    """Passes requests on to a server, but for those that its plan lets fail; counts both."""

    def __init__(self, server):
        self.server = server.removeprefix("http://")
        self.plan, self.passed, self.failed = None, 0, []

    def __enter__(self):
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                proxy.answer(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_):
                pass

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self._thread = threading.Thread(target=self._listener.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._listener.server_port}"
        return self

    def __exit__(self, *_):
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def answer(self, request):
        fault = self.plan and self.plan.fault(f"{request.command} {request.path}")
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if fault:
            self.failed.append((fault, request.command, request.path))
        else:
            self.passed += 1
        if fault == "hang up":
            return
        if fault in ("503", "404"):
            request.send_response(int(fault))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        status, headers, content = self._ask(request, body)
        length = len(content)
        if fault in ("short", "cut"):
            content = content[: length // 2]
            length = len(content) if fault == "short" else length
        request.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                request.send_header(name, value)
        request.send_header("Content-Length", dict(headers)["Content-Length"] if request.command == "HEAD" else length)
        request.end_headers()
        request.wfile.write(content)

    def _ask(self, request, body):
        connection = http.client.HTTPConnection(self.server, timeout=60)
        try:
            connection.request(request.command, request.path, body, dict(request.headers))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class FaultyStore(WrapperStore):
    """A folder whose answers fail by a plan; workers import it from here."""

    def __init__(self, store, plan=None):
        super().__init__(LocalStore(store, read_only=True) if isinstance(store, (str, os.PathLike)) else store)
        self.plan = plan

    def _with_store(self, store):
        return FaultyStore(store, self.plan)

    async def get(self, key, prototype=None, byte_range=None):
        fault = self.plan.fault(key)
        if fault == "lie":
            return None
        if fault == "short":
            found = await super().get(key, prototype, byte_range)
            return None if found is None else found[: len(found) // 2]
        if fault is not None:
            raise {"os": OSError("the disk hums"), "time": TimeoutError(), "other": RuntimeError("out of mood")}[fault]
        return await super().get(key, prototype, byte_range)
