"""Connections that this process has opened since a moment are broken, and no others."""

import socket

from lab.launch.interface import open_sockets, shut_down_connections


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    far.settimeout(1.0)
    return near, far


def is_open(near: socket.socket, far: socket.socket) -> bool:
    try:
        near.sendall(b"x")
        return far.recv(1) == b"x"
    except OSError:
        return False


def test_only_later_connections_break_unless_they_have_a_port_that_is_kept():
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as kept:
        earlier = connected(ours)
        before = open_sockets()
        with socket.create_server(("127.0.0.1", 0)) as later_listener:
            later, spared, local = connected(ours), connected(kept), socket.socketpair()
            shut_down_connections(before, {kept.getsockname()[1]})
            assert is_open(*earlier) and is_open(*spared)
            assert not is_open(*later) and not is_open(*local)
            late = connected(later_listener)
            assert is_open(*late)
        for end in (*earlier, *later, *spared, *local, *late):
            end.close()
