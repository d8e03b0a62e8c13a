"""Clients of servers under test, which all speak plain HTTP.

An `httpx` client reads the machine's certificates when it is made, some 60 ms of CPU each, and tests that
wait for a cluster make many: they would take from it the core on which it is to get ready.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpx

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def plain_client(**settings: Any) -> httpx.Client:
    return httpx.Client(verify=_NO_CERTIFICATES, **settings)


def plain_async_client(**settings: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=_NO_CERTIFICATES, **settings)
