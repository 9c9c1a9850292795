"""The report names the pattern and the transport that have carried the steps' messages."""

from typing import Any

from comm.transport import shared_memory
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import Entry, Traffic
from tests.training.attempts import train
from training.report import median, pattern_and_transport

OURS = "shared_memory" if shared_memory.is_possible() else "sockets"

# Mode, options, and the pattern and the transport that the report names.
RUNS: list[tuple[str, dict[str, Any], str, str]] = [
    ("naive", {"pattern": "ring"}, "ring", OURS),
    ("naive", {"pattern": "torch"}, "torch", "gloo"),
    ("zero3", {}, "ring", OURS),
    ("zero3", {"pattern": "pipelined_ring", "transport": "sockets"}, "pipelined_ring", "sockets"),
    ("zero3", {"transport": "gloo"}, "ring", "gloo"),
    ("tensor_parallel", {"pattern": "pipelined_ring", "clip": 1.0}, "pipelined_ring", OURS),
    ("sequence_parallel", {"pattern": "torch", "clip": 1.0}, "torch", "gloo"),
    ("sequence_parallel", {"pattern": "flat"}, "ring, flat", OURS),  # no operation but all-reduce has flat
    ("pipeline_1f1b", {"pattern": "tree", "transport": "sockets"}, "direct, tree", "sockets"),
]


def test_a_report_names_the_pattern_and_the_transport_that_were_asked_for():
    def work(cluster: Cluster) -> None:
        for mode, options, pattern, transport in RUNS:
            report = train(cluster, mode, steps=1, **options)
            assert (report["pattern"], report["transport"]) == (pattern, transport), (mode, options)
            assert report["bytes_sent"] == report["bytes_formula"], (mode, options)

    run_ranks(work, 2)


def test_headers_are_no_pattern_and_one_rank_has_no_transport():
    traffic = {Entry("all_reduce", "header"): Traffic(100, 5), Entry("broadcast", "tree"): Traffic(0, 0)}
    assert pattern_and_transport(traffic, "ring") == {"pattern": "ring", "transport": "none (one rank)"}
    assert median([None, 3.0, 1.0]) == 2.0 and median([None]) is None
