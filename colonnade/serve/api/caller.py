"""Whose request it is: the client that takes turns in the queue.

A client is an address. Of an IPv6 address the first 64 bits count: one subscriber has all addresses of a /64.
"""

import ipaddress

from starlette.types import Scope

IPV6_PREFIX = 64
"""Bits of an IPv6 address that name a client."""


def address_of(scope: Scope) -> str:
    """The client's address, or its IPv6 network; empty if there is none (a Unix socket)."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address.packed, IPV6_PREFIX), strict=False))
