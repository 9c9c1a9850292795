"""Open a rendezvous store on one address. torch's own store listens on all interfaces of the machine."""

import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a store that listens on an IP address and a port; port 0 means a free one.

    Raise OSError if the port is in use, or if no interface of this machine has the address.
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
