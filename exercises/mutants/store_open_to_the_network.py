"""Any machine in the network can write to the rendezvous store: it listens on all interfaces."""

from datetime import timedelta

import torch.distributed as dist

TARGET = "lab.launch.store.open_store"
KILLER = "tests.comm.test_rendezvous.test_ranks_started_by_hand_listen_in_the_network_of_the_master_only"


def mutant(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=True, timeout=timeout, wait_for_workers=False)
