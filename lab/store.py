"""A rendezvous store that listens on one address; torch's own listens on all interfaces of the machine."""

import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store that listens on that IP address and port; port 0 takes a free one.

    Raises OSError if the port is taken, or the address belongs to no interface of this machine.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
