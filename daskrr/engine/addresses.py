"""Where things are: local paths and URLs, and how they are named in messages."""

import os
import re

# A user name and password; also one with a slash, unless what follows the colon is the number of a port.
USER = r"[^/@\s]+|[^/@\s]*:(?!\d+/)[^@\s]*"


def redact(text: str, address: str = "") -> str:
    """Remove user names, passwords and query strings from URLs in ``text``, and those of one address everywhere."""
    known = re.match(rf"\w+://(?:({USER})@)?[^?]*\??(.*)", address, re.DOTALL)
    for secret in known.groups() if known else ():
        text = text.replace(secret, "***") if secret else text
    text = re.sub(rf"(\w+://)(?:{USER})@", r"\1***@", text)
    return re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*", r"\1?***", text)


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
