"""Measure what right solutions of lesson 5 cost, and compare it with what is possible (targets.py)."""

from unittest import mock

import torch

from comm.collectives import all_reduce
from exercises.outcome import Outcome
from hybrid_parallel import clipping
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.planner import search as planner
from hybrid_parallel.planner.machine import MACHINES
from hybrid_parallel.planner.shapes import SHAPES
from hybrid_parallel.planner.time_model import TimeModel
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import LEDGER


def messages_of_clipping() -> Outcome:
    """Compare the messages of clipping with those of one all-reduce of one number along each axis."""
    ours, fewest = (max(each) for each in zip(*run_ranks(_messages, 4), strict=True))
    text = f"for 2 stages of 2 ranks with 6 gradients each, a rank sends {ours} messages"
    if ours <= fewest:
        return Outcome(True, f"As few as can be: {text}, which add up one number along each axis.")
    return Outcome(False, f"Right, but wasteful: {text}; {fewest} do: add up before you communicate.")


def _messages(cluster: Cluster) -> tuple[int, int]:
    mesh = Mesh(cluster, ParallelSizes(pipeline=2, tensor=2))
    axes = [mesh.pipeline, mesh.tensor]
    for axis in axes:
        all_reduce(torch.zeros(()), group=axis)  # the first one in a group may exchange more
    LEDGER.clear()
    clipping.clip_over(axes, [(torch.ones(3), torch.ones(3)) for _ in range(6)], set(), 1.0, None)
    ours = LEDGER.total().messages_sent
    LEDGER.clear()
    for axis in axes:
        all_reduce(torch.zeros((), dtype=torch.float64), group=axis)
    return ours, LEDGER.total().messages_sent


def predictions_of_the_planner() -> Outcome:
    """Compare the number of predicted step times with the number of plans that fit."""
    counted = mock.patch.object(TimeModel, "predict", autospec=True, side_effect=TimeModel.predict)
    with counted as predict:
        found = planner.plans(SHAPES["llama-3-70b"], MACHINES["h100"], 16, 64)
    fit = sum(plan.seconds is not None for plan in found)
    text = f"for Llama 3 70B on 16 devices it predicts the time of {predict.call_count} of {len(found)} plans"
    if predict.call_count <= fit:
        return Outcome(True, f"As few as can be: {text}, those that fit.")
    return Outcome(False, f"Right, but wasteful: {text}; only {fit} fit.")
