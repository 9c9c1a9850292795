"""The network interface's own counter: what really left this machine, whoever sent it."""

from pathlib import Path


def interface_bytes_sent(name: str = "eth0") -> int | None:
    """Bytes that interface has sent since it came up, headers of all layers included; None without it.

    In a container `eth0` carries nothing but the job's traffic. On a laptop all ranks share `lo`.
    """
    try:
        return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except OSError:
        return None
