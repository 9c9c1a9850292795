"""Each rank gets a GPU of its own with any launcher, or all ranks raise the same error."""

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from comm import rendezvous
from comm.membership import meeting
from lab.ranks import RankError, run_ranks
from tests.comm.places import places, set_variables


def meet(visible: list[list[str]], **variables: object) -> list[Any]:
    """Start a rank for each entry, which lists its GPUs; return its device and backend, or its error."""

    def come(cluster, environments: list[dict[str, object]]) -> tuple[str, str]:
        names, asked = visible[cluster.rank], []
        set_variables(environments[cluster.rank] | {"LOCAL_RANK": cluster.rank})
        os.environ["BACKEND"] = str(variables.get("BACKEND", ""))
        meeting._LINGER = 0.5

        def form(backend: str, **options: Any) -> None:
            asked.append(backend)
            plain("gloo", **options)

        plain = dist.init_process_group
        with ExitStack() as stubs:
            stubs.enter_context(
                mock.patch.multiple(
                    torch.cuda,
                    is_available=lambda: True,
                    device_count=lambda: len(names),
                    set_device=lambda device: None,
                    get_device_properties=lambda device: SimpleNamespace(uuid=names[device.index]),
                )
            )
            stubs.enter_context(mock.patch.object(dist, "init_process_group", form))
            joined = rendezvous.join()
            rendezvous.leave(joined)
        return str(joined.device), asked[0]

    environments = places(list(range(len(visible))), len(visible))
    results = run_ranks(come, len(visible), environments, backend=None, collect_failures=True, timeout=40)
    return [str(r).strip().splitlines()[-1] if isinstance(r, RankError) else r for r in results]


def test_a_rank_takes_its_gpu_of_all_or_the_only_one_that_it_is_shown():
    assert meet([["a", "b"], ["a", "b"]]) == [("cuda:0", "nccl"), ("cuda:1", "nccl")]
    assert meet([["a"], ["b"], ["c"]]) == [("cuda:0", "nccl")] * 3


def test_two_ranks_with_one_gpu_are_refused_on_all_ranks():
    sentence = (
        "comm.errors.CommError: Ranks 0 and 2 share one GPU (a), and nccl needs one for each rank; start "
        "fewer ranks there, give each its own LOCAL_RANK, or let them share with BACKEND=gloo."
    )
    assert meet([["a", "b"]] * 3) == [sentence] * 3
    assert meet([["a", "b"]] * 3, BACKEND="gloo") == [
        ("cuda:0", "gloo"),
        ("cuda:1", "gloo"),
        ("cuda:0", "gloo"),
    ]
