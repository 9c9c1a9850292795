"""Save ranges of flat tensors with torch.distributed.checkpoint (DCP), and load files without trusting them.

DCP asks each item of a state which chunks of its tensor this rank holds, and asks a planner for the tensor
with the data. DCP's own reader unpickles the metadata file, which may run any code. The reader here gets the
metadata from `unpickle`, which allows harmless classes only.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from lab import checkpoint
from lab.launch.errors import WorkbookError


@dataclass(frozen=True, eq=False)
class Range:
    """Hold in `tensor` a rank's range, from element `start` on, of a flat tensor of `numel` elements."""

    tensor: Tensor
    start: int
    numel: int

    def size(self) -> torch.Size:
        return torch.Size([self.numel])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.tensor.numel() == 0 and self.numel > 0:
            return []  # an empty range is no chunk: the next rank's range has the same start
        return [ChunkStorageMetadata(torch.Size([self.start]), self.tensor.shape)]

    def __create_write_items__(self, key: str, _: object) -> list[planner.WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            planner.WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]


Items = dict[str, Range | Tensor]


class SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        item = self.state_dict[index.fqn]
        return item.tensor if isinstance(item, Range) else item


class LoadPlanner(dcp.DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        item = self.state_dict[index.fqn]
        return item.tensor if isinstance(item, Range) else item


class Writer(dcp.FileSystemWriter):
    def write_data(self, *args: Any) -> Any:
        try:
            return super().write_data(*args)
        except (OSError, RuntimeError) as error:
            raise checkpoint.disk_error(error) or error from error

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # DCP's also holds the path, which may change


class Reader(dcp.FileSystemReader):
    def __init__(self, folder: Path, found: Metadata) -> None:
        super().__init__(folder)
        self._found = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._found  # DCP's own reader would unpickle the file


def unpickle(data: bytes, path: Path) -> Metadata:
    try:
        found = Unpickler(io.BytesIO(data)).load()
        if isinstance(found, Metadata) and found.storage_data is not None:
            return found
    except Exception as error:  # unknown bytes may raise any error
        raise WorkbookError(f"{path} is damaged: resume from another checkpoint") from error
    raise WorkbookError(f"{path} is not the metadata of a checkpoint: resume from another one")


class Unpickler(pickle.Unpickler):
    """Unpickle only objects of the classes of tensor metadata, because other classes could run any code.

    So it also refuses DCP's metadata of pickled objects.
    """

    PARTS: tuple[Any, ...] = (
        *(Metadata, StorageMeta, MetadataIndex, ChunkStorageMetadata, filesystem._StorageInfo),
        *(TensorStorageMetadata, TensorProperties, metadata._MEM_FORMAT_ENCODING),
        *(torch.Size, torch.serialization._get_layout),
    )
    NAMES = frozenset((part.__module__, part.__name__) for part in PARTS)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self.NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")
