"""Checks of the Host and Origin headers against foreign web pages in a user's browser.

A foreign page can reach a server on the user's machine in two ways. With DNS rebinding, a name of
the page resolves to 127.0.0.1; the Host header shows that name. With a cross-site POST, the page
cannot read the response but causes its effect. Programs other than browsers send neither a foreign
Host nor an Origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from headway.server.http.errors import ApiError, format_value

ANY = "*"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OWN_SITES = frozenset({"same-origin", "none"})  # none: the user entered the address
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def default_allowed_hosts(host: str, *, has_key: bool) -> tuple[str, ...]:
    """Names of this machine on a loopback address without an API key; otherwise any host."""
    if has_key or not is_loopback(host):
        return (ANY,)
    return tuple(dict.fromkeys((*LOOPBACK, host)))


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(headers: Headers, allowed: Collection[str]) -> None:
    """ApiError 403 if the Host header names a host that is not allowed."""
    given = headers.get("host")
    if ANY in allowed or given is None:  # HTTP/1.0 clients send none; browsers always do
        return
    name = host_name(given)
    if name not in allowed and name not in {host_name(each) for each in allowed}:
        advice = "allow it with --allowed-host, or any host with --allowed-host '*'"
        problem = f"the Host {format_value(name)} is not allowed; {advice}"
        raise ApiError(403, problem, param="Host", code="host_not_allowed")


def host_name(host: str) -> str:
    """The name in a Host header, in lowercase, without port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name = host if host.count(":") > 1 else host.partition(":")[0]  # a bare IPv6 address
    return name.removesuffix(".")


def check_origin(method: str, headers: Headers, allowed: Collection[str]) -> None:
    """ApiError 403 if a web page of a foreign site sends a request that is not safe."""
    if method in SAFE_METHODS or ANY in allowed:
        return
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin in allowed or site in OWN_SITES:
        return
    if site is None and (origin is None or urlsplit(origin).netloc == headers.get("host")):
        return
    problem = f"web pages of the origin {format_value(origin or site)} may not call this server"
    advice = "allow the origin with --allowed-origins, or set an API key"
    raise ApiError(403, f"{problem}; {advice}", param="Origin", code="origin_not_allowed")
