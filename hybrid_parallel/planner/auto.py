"""Let the planner choose how the ranks of a run are divided: `sharding_strategy: auto`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from comm.collectives import default_pattern
from comm.cost import Link
from comm.exchange import on_main
from comm.wire import slow_link
from hybrid_parallel.arguments import HybridArgs, model_of, moe_of
from hybrid_parallel.config import load, split_config
from hybrid_parallel.planner.machine import MACHINES, Machine, this_machine
from hybrid_parallel.planner.search import plans
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.launch.usage import read_words
from training.calibrate import measure_all_reduce


def read_arguments(words: Sequence[str], cluster: Cluster) -> HybridArgs:
    """Return the arguments of train_hybrid.py. All ranks must call it."""
    path, overrides = split_config(words)
    if path is None:
        return read_words(words, HybridArgs)
    config = load(path, overrides)
    if config.num_processes != cluster.world_size:
        raise WorkbookError(
            f"num_gpus is {config.num_processes}, but {cluster.world_size} processes have started; start "
            f"them with scripts/launch_training.sh, or give --num-gpus {cluster.world_size} too."
        )
    if config.given is None:
        return config.args
    return replace(config.args, **asdict(choose_sizes(cluster, config.args, config.given)))


def choose_sizes(cluster: Cluster, args: HybridArgs, given: Mapping[str, Any]) -> ParallelSizes:
    """Return rank 0's choice for the link and the rates that the ranks measure. All ranks must call it."""
    machine = measured_machine(cluster, slow_link.parse(args.link) if args.link else None)
    shape, fixed = ModelShape(**vars(model_of(args))), {"precision": args.precision} | dict(given)
    if moe := moe_of(args):
        shape = replace(shape, experts=moe.num_experts, active_experts=moe.top_k)

    def chosen() -> dict[str, Any]:
        return asdict(plans(shape, machine, cluster.world_size, args.batch_size, **fixed)[0].sizes)

    return ParallelSizes(**on_main(cluster, "choose a plan", chosen))


def measured_machine(cluster: Cluster, link: Link | None = None) -> Machine:
    """Return the machine that the ranks run on, as they measure it over `link`. All ranks must call it."""
    with slow_link.slowed(link):
        link = measure_all_reduce(default_pattern("all_reduce"), device=cluster.device)
    if cluster.device.type == "cpu":
        return this_machine(cluster.world_size, link)
    name = torch.cuda.get_device_name(cluster.device).lower()
    known = [device for device in MACHINES if device.partition("-")[0] in name]
    if not known:
        raise WorkbookError(f"The planner does not know a {name}: give the sizes, and leave auto out.")
    return replace(MACHINES[known[-1]], outer=link, autocast=True)
