"""Give torch fake GPUs and a fake nccl. Import this before torch, which looks for devices at once.

README.md says what the fakes are and how far to trust them. FAKE_GPUS is their number (8).
"""

import contextlib
import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fake_gpu.build import MODULE, folder

_folder = folder()  # that `python -m tests.fake_gpu.build` has filled
# First the libraries of this torch: the build may come from another environment with the same version, and
# would load the libraries of that one beside them.
_torch = importlib.util.find_spec("torch")
assert _torch is not None and _torch.submodule_search_locations
for _library in (
    Path(_torch.submodule_search_locations[0]) / "lib" / "libtorch_cpu.so",
    _folder / "hooks.so",
):
    ctypes.CDLL(str(_library), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402  (after the hooks)
import torch.distributed as dist  # noqa: E402

_spec = importlib.util.spec_from_file_location(MODULE, _folder / f"{MODULE}.so")
assert _spec is not None and _spec.loader is not None
extension = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(extension)
sys.modules[MODULE] = extension


def _unchecked() -> set[str]:
    """Return the operators whose tensors torch's wrappers do not check: single numbers of the host pass."""
    import torchgen

    operators = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = operators.read_text().split("\n- func: ")
    return {"aten::" + one.split("(")[0] for one in entries if "device_check: NoCheck" in one}


extension.leave_unchecked({name if "." in name else f"{name}." for name in _unchecked()})


def _index(device: Any) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return extension.current_device() if index is None else index


class Stream(torch.Stream):
    """This class stands for torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> "Stream":
        if known:
            return super().__new__(cls, priority=priority, **known)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)


class Event:
    """This class stands for torch.cuda.Event; it makes a torch.Event, as elapsed_time() takes no other."""

    def __new__(cls, enable_timing: bool = False, **_: Any) -> torch.Event:  # type: ignore[misc]
        return torch.Event(torch.device("cuda"), enable_timing=enable_timing)


class Device:
    """Stand for torch.cuda.device, a context."""

    def __init__(self, device: Any) -> None:
        self._device = _index(device)

    def __enter__(self) -> None:
        self._before = extension.current_device()
        extension.set_device(self._device)

    def __exit__(self, *_: object) -> None:
        extension.set_device(self._before)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


@contextlib.contextmanager
def in_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Stand for torch.cuda.stream, a context."""
    with contextlib.nullcontext() if stream is None else stream:
        yield


_resize_on_host = torch.UntypedStorage.resize_


def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize_on_host(storage, num_bytes)
    extension.resize_storage(storage, int(num_bytes))
    return storage


class Options:
    """This class stands for ProcessGroupNCCL.Options."""

    is_high_priority_stream = False


def _pretend() -> None:
    cuda: Any = torch.cuda
    for name in ("_lazy_init", "empty_cache", "manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda *_: None)  # one each: torch.compile has a rule for each function
    cuda.is_available = lambda: extension.device_count() > 0
    cuda.is_initialized = lambda: True
    cuda.device_count = extension.device_count
    cuda.current_device = extension.current_device
    cuda.set_device = lambda device: extension.set_device(_index(device))
    cuda.device, cuda.stream, cuda.set_stream = Device, in_stream, torch.accelerator.set_stream
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = current_stream
    cuda.default_stream = lambda device=None: Stream(device_index=_index(device), stream_id=0, device_type=1)
    cuda.synchronize = lambda device=None: extension.synchronize()
    cuda.memory_allocated = lambda device=None: extension.allocated_bytes()
    cuda.max_memory_allocated = lambda device=None: extension.peak_bytes()
    cuda.reset_peak_memory_stats = lambda device=None: extension.reset_peak()
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "fake"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(uuid=f"fake {_index(device)}")
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # type: ignore[assignment]
    # Kernels are the CPU's, and draw from its generator.
    cuda.default_generators = (torch.default_generator,) * extension.device_count()
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    for choose in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        choose(False)  # attention by plain matrix products

    c10d: Any = dist.distributed_c10d
    extension.ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = extension.ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True


_pretend()
