"""Stores that fail, lie and cut off: a proxy before an S3 server, and a Zarr store of a user.

What fails is decided by the name of the object and how often it was asked for, so that neither threads nor processes
change it.
"""

import collections
import http.client
import os
import re
import threading
import uuid
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from zarr.storage import LocalStore, WrapperStore

ASKED = collections.Counter()
ABSENT = (404, [("Content-Type", "application/xml"), ("Content-Length", "0")], b"<Error><Code>NoSuchKey</Code></Error>")
LONG_AGO = "Thu, 01 Jan 2026 00:00:00 GMT"


class Plan:
    """Which requests fail and how: a share of those for all names, or for those that contain ``only``."""

    def __init__(self, kinds, share=0.05, seed=0, only=""):
        self.kinds, self.share, self.seed, self.only = kinds, share, seed, only
        self.log, self.name = None, uuid.uuid4().hex

    def fault(self, name):
        """The kind of failure of this request, if it fails."""
        if self.only not in name:
            return None
        ASKED[name, self.name] += 1
        chance = zlib.crc32(f"{self.seed} {name} {ASKED[name, self.name]}".encode())
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


class LateProxy(Proxy):
    """Before a server whose changes some readers see late: for some requests after it, a change has not happened yet.

    Objects that are new are not found, those that were replaced or deleted are still the old ones, and lists tell of
    neither. Conditions are judged by the server, which knows better. How long a change takes depends on its name and
    how often that was changed, not on the clock.
    """

    CONTENTS = re.compile(r"<Contents>.*?</Contents>", re.DOTALL)
    KEY = re.compile(r"<Key>(.*?)</Key>")

    def __init__(self, server, share=0.3, longest=12, seed=0, lists_only=False):
        super().__init__(server)
        self.share, self.longest, self.seed, self.lists_only = share, longest, seed, lists_only
        self.requests, self.late = 0, 0
        self._changes = collections.Counter()
        self._stored = {}  # by object: the answer to who reads it
        self._pending = {}  # by object: until which request, and the answer until then
        self._lock = threading.RLock()

    def _ask(self, request, body):
        with self._lock:
            self.requests += 1
            path, _, query = request.path.partition("?")
            if request.command in ("PUT", "DELETE") or (request.command == "POST" and "delete" in query):
                return self._changed(request, body, path)
            if request.command in ("GET", "HEAD") and "list-type" in query:
                return self._listed(request, body, path)
            seen = self._seen_late(path)
            if seen is None or self.lists_only:
                return super()._ask(request, body)
            self.late += 1
            return seen if request.command == "GET" else (seen[0], seen[1], b"")

    def _changed(self, request, body, path):
        keys = [path] if request.command != "POST" else [f"{path}/{key}" for key in self.KEY.findall(body.decode())]
        before = {key: self._seen_late(key) or self._stored.get(key, ABSENT) for key in keys if self._is_late(key)}
        answer = super()._ask(request, body)
        if answer[0] < 300:
            tag = dict(answer[1]).get("ETag", "")
            now = [("ETag", tag), ("Last-Modified", LONG_AGO), ("Content-Length", str(len(body)))]
            self._stored |= dict.fromkeys(keys, (200, now, body) if request.command == "PUT" else ABSENT)
            # What the server has copied is not known here.
            if "x-amz-copy-source" not in request.headers:
                self._pending |= {key: (self.requests + self.longest, seen) for key, seen in before.items()}
        return answer

    def _is_late(self, key):
        self._changes[key] += 1
        return zlib.crc32(f"{self.seed} {key} {self._changes[key]}".encode()) < self.share * 2**32

    def _seen_late(self, key):
        until, seen = self._pending.get(key, (0, None))
        return seen if self.requests < until else None

    def _listed(self, request, body, path):
        status, headers, content = super()._ask(request, body)
        start = f"{path}/"

        def old(found):
            seen = self._seen_late(start + self.KEY.search(found[0])[1])
            self.late += seen is not None
            return "" if seen is not None and seen[0] == 404 else found[0]

        return status, headers, self.CONTENTS.sub(old, content.decode()).encode()


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
