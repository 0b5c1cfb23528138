"""What Mooncake reads from a process's environment, set before it is imported there."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping

from penstock.errors import SetupError


def set_environment(address: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Set what Mooncake reads, in every process, before it is imported there; `address` is this node's own.

    The variables are set, not defaulted: a child of another node's process inherits the address of that node.
    """
    variables = os.environ if environment is None else environment
    # Mooncake's shortcut, a memcpy for what lies on the same host, is not made for several processes of one host.
    variables["MC_STORE_MEMCPY"] = "0"
    variables["MC_TCP_BIND_ADDRESS"] = address


def address_towards(host: str) -> str:
    """The address of this node that `host`, where the owner listens, can reach it by: loopback if `host` is.

    Raises `SetupError` if that would be a link-local address, which is good on one cable only, or none at all.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: the kernel chooses the route, and with it the address
            found = str(probe.getsockname()[0])
    except OSError as error:
        raise SetupError(f"data_plane.bind_address: {host} cannot be reached from this node: {error}") from error
    return require_routable(found)


def require_routable(address: str) -> str:
    """The same address; `SetupError` if other nodes cannot reach it."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast:
        raise SetupError(
            f"data_plane.bind_address: {address} is no address that other nodes can reach; set it to an address of "
            "this node in the cluster's network, or to 127.0.0.1 for one node"
        )
    return address
