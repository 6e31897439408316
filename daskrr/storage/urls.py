"""Where things are: local paths and URLs, and how they are named in messages."""

import html
import logging
import os
import re

from daskrr.errors import printable

# A filter sees what is logged by its logger, not by those below it.
LOGGERS = ("daskrr", "daskrr.progress", "daskrr.records", "daskrr.lease")

# A user name and password; also one with a slash, unless what follows the colon is the number of a port.
USER = r"[^/@\s]+|[^/@\s]*:(?!\d+/)[^@\s]*"


def redact(text: str, address: str = "") -> str:
    """Remove user names, passwords and query strings from URLs in ``text``, and those of one address everywhere."""
    known = re.match(rf"\w+://(?:({USER})@)?[^?]*\??(.*)", address, re.DOTALL)
    for secret in known.groups() if known else ():
        text = text.replace(secret, "***") if secret else text
    text = re.sub(rf"(\w+://)(?:{USER})@", r"\1***@", text)
    return re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*", r"\1?***", text)


def excerpt(value: object, most: int = 80) -> str:
    """The beginning of how Python writes a value, for messages about what others wrote."""
    try:
        text = printable(str(value) if isinstance(value, BaseException) else repr(value))
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep to be shown"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def escaped(text: str) -> str:
    """Text that comes from elsewhere as a part of a page: neither markup nor what is not printed."""
    return html.escape(printable(text))


def one_line(record: logging.LogRecord) -> bool:
    """Filter of our loggers: a record is one line without secrets, whatever it tells of."""
    record.msg, record.args = printable(redact(record.getMessage())), ()
    return True


for name in LOGGERS:
    logging.getLogger(name).addFilter(one_line)


def locate(path: str | os.PathLike) -> str:
    """An absolute local path, also for ``file://``, whose own store may tear chunks; or the URL as it is."""
    name = os.fspath(path).removeprefix("file://")
    return name if "://" in name else os.path.abspath(name)


def is_local(address: str) -> bool:
    """Whether what :func:`locate` returned is a path and not a URL."""
    return "://" not in address


def is_s3(address: str) -> bool:
    """Whether what :func:`locate` returned is on an S3-compatible store."""
    return address.startswith("s3://")
