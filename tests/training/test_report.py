"""The report names the pattern and the transport that have carried the steps' messages."""

from typing import Any

import pytest

from comm.transport import segment
from lab.cluster import Cluster
from lab.ranks import run_ranks
from lab.trace.ledger import Entry, Traffic
from tests.data_parallel import test_scripts
from tests.pipeline_parallel import test_scripts as pipeline_scripts
from tests.tensor_parallel import test_scripts as tensor_scripts
from tests.zero import test_scripts as zero_scripts
from training.report import median, pattern_and_transport

OURS = "shared_memory" if segment.is_possible() else "sockets"
TRANSPORTS = {"torch": "gloo"}


def names(summary: dict[str, Any]) -> tuple[str, str]:
    assert summary["bytes_sent"] == summary["bytes_formula"]
    assert summary["messages_sent"] == summary["messages_formula"]
    return summary["pattern"], summary["transport"]


def test_the_pattern_that_was_asked_for_has_run_and_is_named_with_its_transport():
    patterns = ("ring", "pipelined_ring", "tree", "torch")

    def work(cluster: Cluster) -> list[tuple[str, str]]:
        return [names(test_scripts.train(cluster, "naive", steps=1, pattern=p)) for p in patterns]

    for found in run_ranks(work, 2):
        assert found == [(pattern, TRANSPORTS.get(pattern, OURS)) for pattern in patterns]


def test_without_a_pattern_it_is_the_default_and_the_transport_that_was_asked_for_is_named():
    def work(cluster: Cluster) -> list[tuple[str, str]]:
        names_by_default = names(zero_scripts.train(cluster, "zero3", steps=1))
        transports = ("sockets", "gloo", "auto")  # "auto" names all that have been used
        return [
            names_by_default,
            *(names(zero_scripts.train(cluster, "zero3", steps=1, transport=one)) for one in transports),
        ]

    for by_default, sockets, gloo, _ in run_ranks(work, 2):
        assert by_default == ("ring", OURS)
        assert sockets == ("ring", "sockets")
        assert gloo == ("ring", "gloo")


@pytest.mark.parametrize("pattern", ["ring", "pipelined_ring", "torch"])
@pytest.mark.parametrize("name", tensor_scripts.SCRIPTS)
def test_tensor_parallelism_takes_a_pattern_for_each_of_its_collectives(name: str, pattern: str):
    def work(cluster: Cluster) -> tuple[tuple[str, str], float]:
        summary = tensor_scripts.summary(cluster, name, steps=2, pattern=pattern, clip=1.0)
        return names(summary), summary["last_loss"]

    [(found, loss)] = set(run_ranks(work, 2))
    assert found == (pattern, TRANSPORTS.get(pattern, OURS))
    [(_, alone)] = run_ranks(work, 1)
    assert loss == pytest.approx(alone, rel=1e-5)


def test_a_pattern_that_an_operation_does_not_have_leaves_it_the_fastest_one():
    def work(cluster: Cluster) -> tuple[str, str]:
        return names(tensor_scripts.summary(cluster, "sequence_parallel", steps=1, pattern="flat"))

    assert run_ranks(work, 2)[0][0] == "ring, flat"


def test_a_pipelines_messages_go_directly_and_its_loss_by_the_pattern():
    def work(cluster: Cluster, name: str, transport: str) -> tuple[str, str]:
        return names(pipeline_scripts.summary(cluster, name, steps=1, pattern="tree", transport=transport))

    for name, transport, used in (
        ("naive", "auto", OURS),
        ("gpipe", "sockets", "sockets"),
        ("1f1b", "gloo", "gloo"),
    ):
        assert set(run_ranks(work, 2, name, transport)) == {("direct, tree", used)}


def test_headers_are_no_pattern_and_one_rank_has_no_transport():
    traffic = {Entry("all_reduce", "header"): Traffic(100, 5), Entry("broadcast", "tree"): Traffic(0, 0)}
    assert pattern_and_transport(traffic, "ring") == {"pattern": "ring", "transport": "none (one rank)"}
    assert median([None, 3.0, 1.0]) == 2.0 and median([None]) is None
