"""What all tests share: ranks that start with everything imported, and hypothesis at a modest pace."""

import os

from hypothesis import settings

from lab import ranks

ranks.preload(
    "pytest",
    "hypothesis",
    "comm.collectives",
    "comm.cost",
    "comm.point_to_point",
    "comm.rendezvous",
    "data_parallel.train_bucket_overlap",
    "data_parallel.sharded_checkpoint",
    "data_parallel.train_ddp",
    "data_parallel.train_fsdp",
    "data_parallel.train_naive",
    "data_parallel.train_overlap",
    "data_parallel.train_zero3",
    "tensor_parallel.train_native",
    "lab.check",
    "lab.metronome",
)

settings.register_profile(
    "workbook", deadline=None, max_examples=20, derandomize=bool(os.environ.get("CI")), print_blob=True
)
settings.load_profile("workbook")
