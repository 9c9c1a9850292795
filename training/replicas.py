"""Compare the ranks' replicas of a model, bit for bit."""

from torch import nn

from comm.exchange import exchange
from lab.check import module_digest, state_digest
from lab.cluster import Cluster


def replica_digests(cluster: Cluster, module: nn.Module) -> list[str]:
    """Return every rank's digest of the full model, in rank order. All ranks must call it."""
    if not hasattr(module, "full_state_dict"):
        return exchange(module_digest(module))
    return exchange(state_digest(module.full_state_dict()))  # type: ignore[operator]


def replicas_equal(cluster: Cluster, module: nn.Module) -> bool:
    """Return whether all ranks hold bitwise the same module. All must call it, and get the same answer."""
    return len(set(replica_digests(cluster, module))) == 1
