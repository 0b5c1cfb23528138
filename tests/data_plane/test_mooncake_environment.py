"""What Mooncake finds in its environment, and the addresses that nodes tell each other."""

from __future__ import annotations

import os
import socket

import pytest

from penstock.data_plane.adapters.mooncake.environment import address_towards, require_routable, set_environment
from penstock.data_plane.adapters.mooncake.listening import free_port, listening_sockets
from penstock.errors import SetupError


def test_what_was_inherited_is_replaced() -> None:
    inherited = {"MC_TCP_BIND_ADDRESS": "10.0.0.7", "MC_STORE_MEMCPY": "1", "HOME": "/home/me"}
    set_environment("10.0.0.8", inherited)
    assert inherited == {"MC_TCP_BIND_ADDRESS": "10.0.0.8", "MC_STORE_MEMCPY": "0", "HOME": "/home/me"}


def test_it_is_this_process_that_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "10.0.0.7")
    monkeypatch.delenv("MC_STORE_MEMCPY", raising=False)
    set_environment("127.0.0.1")
    assert (os.environ["MC_TCP_BIND_ADDRESS"], os.environ["MC_STORE_MEMCPY"]) == ("127.0.0.1", "0")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.5"])
def test_an_owner_on_loopback_is_reached_over_loopback(host: str) -> None:
    assert address_towards(host).startswith("127.") or address_towards(host) == "::1"


@pytest.mark.parametrize("address", ["169.254.3.4", "fe80::1%eth0", "0.0.0.0", "::", "224.0.0.1"])
def test_an_address_that_other_nodes_cannot_reach_is_refused(address: str) -> None:
    with pytest.raises(SetupError, match=r"data_plane\.bind_address: .* no address that other nodes can reach"):
        require_routable(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "192.168.0.4", "fd00::5", "8.8.4.4"])
def test_an_address_that_they_can_reach_is_taken(address: str) -> None:
    assert require_routable(address) == address


def test_an_owner_that_has_no_address_is_named() -> None:
    with pytest.raises(SetupError, match=r"data_plane\.bind_address: no\.such\.host\.invalid cannot be reached"):
        address_towards("no.such.host.invalid")


def test_a_process_listens_where_its_sockets_do() -> None:
    port = free_port("127.0.0.1")
    assert ("127.0.0.1", port) not in listening_sockets(os.getpid())
    with socket.create_server(("127.0.0.1", port)):
        assert ("127.0.0.1", port) in listening_sockets(os.getpid())
        assert ("127.0.0.1", port) not in listening_sockets(os.getppid()), "sockets of other processes are not counted"
    assert ("127.0.0.1", port) not in listening_sockets(os.getpid())


def test_a_socket_of_the_other_family_is_seen_too() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("there is no IPv6 here")
    with server:
        assert ("::1", server.getsockname()[1]) in listening_sockets(os.getpid())
