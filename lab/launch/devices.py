"""Choose the device of each rank on this machine: the CPU or a GPU."""

import torch

from lab.launch.errors import WorkbookError


def num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_of(local_rank: int, device: str = "cuda") -> torch.device:
    """Return the device of a rank: the CPU, or for "cuda" the GPU `local_rank` modulo the number of GPUs."""
    return torch.device("cuda", local_rank % num_gpus()) if device == "cuda" else torch.device(device)


def refuse_devices(device: str, backend: str | None, world_size: int) -> None:
    """Raise WorkbookError if `run_ranks` cannot use `device`, or not with this backend and world size."""
    if device not in ("cpu", "cuda"):
        raise WorkbookError(f"run_ranks(device={device!r}): it must be 'cpu' or 'cuda'.")
    needs_nccl = backend is not None and "nccl" in backend
    if device == "cpu":
        if needs_nccl:
            raise WorkbookError("run_ranks(backend='nccl'): nccl sends from GPUs only; add device='cuda'.")
        return
    gpus = num_gpus()
    if not gpus:
        raise WorkbookError("run_ranks(device='cuda'): this machine has 0 GPUs.")
    if needs_nccl and world_size > gpus:
        raise WorkbookError(
            f"run_ranks(backend='nccl'): {world_size} ranks have {gpus} GPUs, and nccl needs one for each; "
            "start fewer ranks, or let them share with backend='gloo'."
        )
