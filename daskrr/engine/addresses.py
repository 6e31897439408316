"""Where things are: local paths and URLs, and how they are named in messages."""

import os
import re


def redact(text: str) -> str:
    """Remove user names, passwords and query strings from URLs in ``text``."""
    text = re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", text)
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
