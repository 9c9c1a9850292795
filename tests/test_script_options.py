"""Test what the options of the train scripts do: bytes, rows of the report, traces, resumes and refusals.

tests/test_scripts.py asks of all scripts what they do with their defaults.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from comm.wire.hosts import VARIABLE
from data_parallel import train_alone
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.ranks import forked, run_ranks
from pipeline_parallel.analysis import compare, theory
from pipeline_parallel.schedules import stages_per_rank
from tests.on_ranks import on_ranks
from tests.run_modes import train

forked.preload("pipeline_parallel.train_zero_bubble", "pipeline_parallel.train_interleaved")

SHORT = ("--steps", "2", "--batch-size", "8", "--size", "tiny", "--lr", "3e-3", "--seed", "1")
PIPELINE = "--microbatches 4 --layers 4 --steps 1 --batch-size 4"
Report = dict[str, Any]


def run(cluster: Cluster, words: str, *options: str) -> Report:
    """Return this rank's report of a mode with its options; what the rank sends must be what is expected."""
    mode, *own = words.split()
    report = train(cluster, mode, *SHORT, *own, *options)
    for what in ("bytes_sent", "messages_sent", "block_bytes"):
        if what in report:
            formula = f"{what.removesuffix('_sent')}_formula"
            assert report[what] == report[formula], (words, what)
    assert report["replicas_equal"], words
    return report


def all_reduces(times: int) -> int:
    """Return the bytes of so many all-reduces on 4 ranks of 2 windows of 32 tokens, of width 32."""
    return times * 2 * 3 * 2 * 32 * 32 * 4 // 4


# The number of ranks, the mode and its options, and rows of the report. Of four ranks two are on each host.
RUNS: list[tuple[int, str, Report]] = [
    (4, "data_parallel_bucket_overlap --pattern hierarchical", {}),
    (2, "data_parallel_compressed --compress bf16 --grad-acc-steps 2", {"bytes_share": 0.5}),
    (2, "data_parallel_compressed --compress int8 --no-error-feedback", {}),
    (2, "data_parallel_compressed --compress topk --topk-share 0.02", {}),
    (2, "data_parallel_compressed --compress powersgd --powersgd-rank 2 --compress-after 1", {}),
    (2, "local_sgd --sync-every 3 --average-state --optimizer momentum --lr 0.1", {"sync_every": 3}),
    (2, "diloco --sync-every 2 --optimizer sgd --outer-lr 1 --outer-momentum 0", {"fragments": 1}),
    (2, "diloco --sync-every 4 --fragments 2 --delay 3 --wire-dtype int8", {"sync_every": 4, "fragments": 2}),
    (2, "zero1_textbook --clip 0.5 --grad-acc-steps 2", {}),
    (2, "zero1 --clip 0.5 --grad-acc-steps 2", {}),
    (2, "zero2 --clip 0.5 --grad-acc-steps 2", {}),
    (2, "zero3_textbook --clip 0.5 --grad-acc-steps 2", {}),
    (2, "zero3 --clip 0.5 --grad-acc-steps 2 --bf16", {}),
    (4, "hsdp --shard-size 1", {"machines": 4}),
    (4, "hsdp --grad-acc-steps 2 --clip 0.5 --optimizer momentum", {"machines": 2}),
    (4, "hsdp --shard-size 4", {"machines": 1}),
    (4, "tensor_parallel --batch-size 2", {"block_bytes": all_reduces(4)}),
    (4, "tensor_parallel --batch-size 2 --no-overlap --clip 1", {"block_bytes": all_reduces(4)}),
    # With overlap the backward gathers the inputs again.
    (4, "sequence_parallel --batch-size 2", {"block_bytes": all_reduces(5)}),
    (4, "sequence_parallel --batch-size 2 --no-overlap --clip 1", {"block_bytes": all_reduces(4)}),
    (4, "expert_parallel --batch-size 4", {"dropped_tokens": 0}),
    (4, "expert_parallel --batch-size 4 --capacity 1 --balance bias --shared --top-k 1", {}),
    (
        4,
        "expert_parallel --batch-size 4 --expert-ranks 2 --balance none --pattern tree",
        {"dropped_tokens": 0},
    ),
]


@pytest.mark.parametrize("n", [2, 4])
def test_runs_with_options_send_what_the_formula_says_train_and_report_their_rows(n: int):
    runs = {words: rows for ranks, words, rows in RUNS if ranks == n}

    def work(cluster: Cluster) -> list[Report]:
        os.environ[VARIABLE] = "aabb"[cluster.rank] if n == 4 else "a"
        return [run(cluster, words, "--steps", "5") for words in runs]

    by_rank = run_ranks(work, n, timeout=300)
    found = dict(zip(runs, map(list, zip(*by_rank, strict=True)), strict=True))
    for words, rows in runs.items():
        for report in found[words]:
            assert report["bytes_sent"] > 0, words
            assert math.isfinite(report["validation_loss"]) and report["last_loss"] < report["first_loss"]
            assert {name: report[name] for name in rows} == pytest.approx(rows, rel=1e-2), words
    if n == 4:
        one_machine_sends_nothing_to_others(*(found[words] for words in found if "hsdp" in words))
        experts_report_what_the_router_decides(*(found[words] for words in found if "expert" in words))
        kept = {words: reports[0].get("activations_bytes") for words, reports in found.items()}
        assert kept["sequence_parallel --batch-size 2"] < 0.7 * kept["tensor_parallel --batch-size 2"]


def one_machine_sends_nothing_to_others(alone: list[Report], two: list[Report], one: list[Report]) -> None:
    """Compare runs with one rank, two and all on a machine."""
    assert all(report["shards_bytes_sent"] == 0 < report["replicas_bytes_sent"] for report in alone)
    assert all(report["shards_bytes_sent"] > report["replicas_bytes_sent"] > 0 for report in two)
    assert all(report["shards_bytes_sent"] > 0 == report["replicas_bytes_sent"] for report in one)
    for name in ("parameters_bytes", "gradients_bytes"):
        assert alone[0][name] > two[0][name] > one[0][name]
        assert two[0][name] == pytest.approx(two[0][f"formula_{name}"], rel=1e-2)


def experts_report_what_the_router_decides(
    plain: list[Report], dropping: list[Report], replicated: list[Report]
) -> None:
    for one in (*plain, *dropping, *replicated):
        assert 0 < one["dispatch_bytes"] < one["bytes_sent"]
        tokens = one["tokens_per_expert"]
        assert one["imbalance"] == pytest.approx(max(tokens) / (sum(tokens) / 8), rel=1e-3)
    assert sum(plain[0]["tokens_per_expert"]) == 4 * 32 * 2
    assert sum(dropping[0]["tokens_per_expert"]) == 4 * 32 and dropping[0]["dropped_tokens"] > 0
    assert replicated[0]["dispatch_bytes"] < plain[0]["dispatch_bytes"]
    assert len({str(one["tokens_per_expert"]) for one in plain}) == 1


BIASES = "--balance bias --bias-rate 0.01 --shared --batch-size 4"
# Runs of one step each, of which each resumes the one before on other ranks, and one that trains in one go.
CHAINS: list[tuple[list[tuple[int, str]], str]] = [
    ([(2, "tensor_parallel"), (2, "sequence_parallel")], "tensor_parallel_native --sequence-parallel"),
    ([(4, f"expert_parallel {BIASES} --expert-ranks 2"), (2, f"expert_parallel {BIASES}")],
     f"expert_parallel {BIASES}"),
    ([(4, "hsdp --batch-size 12"), (3, "zero3 --batch-size 12"), (2, "hsdp --batch-size 12")],
     "zero3 --batch-size 12"),
    ([(1, "data_parallel_bucket_overlap --batch-size 12"),
      (4, "hybrid --batch-size 12 --tensor 2 --zero 3 --layers 2"), (3, "data_parallel_ddp --batch-size 12")],
     "data_parallel_naive --batch-size 12"),
]  # fmt: skip


@pytest.mark.parametrize(("chain", "alone"), CHAINS, ids=[alone for _, alone in CHAINS])
def test_a_run_resumes_on_other_ranks_in_another_mode(chain: list, alone: str, tmp_path: Path):
    for steps, (n, words) in enumerate(chain, start=1):
        options = ["--checkpoint", str(tmp_path), "--steps", str(steps)] + ["--resume"] * (steps > 1)
        found = run_ranks(lambda cluster, words=words, options=options: run(cluster, words, *options), n)
    [expected, *_] = run_ranks(lambda cluster: run(cluster, alone, "--steps", str(len(chain))), 1)
    for one in found:
        assert one["steps"] == 1
        for loss in ("last_loss", "validation_loss"):
            assert one[loss] == pytest.approx(expected[loss], rel=1e-4)
        assert one.get("tokens_per_expert") == expected.get("tokens_per_expert")


HEADS = "4 query heads cannot be divided among 3 ranks equally; --size 24heads takes"
# The number of ranks, the mode and its options, and the beginning of the sentence.
REFUSED: list[tuple[int, str, str]] = [
    *((3, mode, HEADS) for mode in ("tensor_parallel", "sequence_parallel", "tensor_parallel_native")),
    (2, "pipeline_1f1b --microbatches 3", "--microbatches 3 must divide --batch-size 8"),
    (2, "pipeline_1f1b --microbatches 0", "--microbatches 0: there must be at least 1"),
    (2, "pipeline_interleaved --chunks 10000000000", "--chunks 10000000000: .* at most 4096"),
    (2, f"pipeline_interleaved {PIPELINE} --chunks 10", "6 parts cannot be cut into 20 stages: take fewer"),
    (2, "pipeline_afab --model baby_cnn --metronome 20ms", "--metronome works with the GPT only"),
    (2, "pipeline_afab --metronome soon", "--metronome soon: 'soon' is not a time"),
    (3, "context_ring --length 0", "--length 0: a sequence has 1 to 1048576 tokens.$"),
    (3, "context_all_to_all --length 2097152", "--length 2097152: a sequence has 1 to"),
    (3, "context_all_to_all", ".* 4 heads of keys and values cannot be divided among 3 ranks equally"),
    (2, "expert_parallel --experts 9 --expert-ranks 2",
     "--experts 9: 2 ranks cannot share them equally; choose .* such as --experts 10"),
    (2, "expert_parallel --experts 0", "--experts 0: there must be at least one"),
    (2, "expert_parallel --expert-ranks 3", "--expert-ranks 3 must divide the 2 ranks"),
    (2, "expert_parallel --top-k 9", "--top-k 9: a token passes at least 1 and at most all 8 experts"),
    (2, "expert_parallel --capacity nan", "--capacity nan: it is a number above 0"),
    (2, "expert_parallel --aux-weight -1", "--aux-weight -1: it is a number from 0"),
    (2, "expert_parallel --bias-rate inf", "--bias-rate inf: it is a number from 0"),
    (2, "diloco_plain --steps 7 --sync-every 3", "--steps 7 must be a multiple of --sync-every 3.$"),
    (2, "diloco_plain --sync-every 0", "--steps 2 must be a multiple of --sync-every 0.$"),
    (2, "diloco_plain --sync-every 1 --outer-lr 0", "--outer-lr 0.0: it is a number above 0.$"),
    (2, "diloco_plain --sync-every 1 --outer-momentum 1",
     "--outer-momentum 1.0: it is a number from 0, and less than 1.$"),
    (2, "diloco_elastic --kill 1", "--kill 1: write RANK@STEP, with a rank from 0 to 1"),
    (2, "diloco_elastic --come-back -1", "--come-back -1: it is a number of seconds, 0 or more"),
    (2, "diloco_elastic --patience 0", "--patience 0: it is a number of seconds above 0"),
    (2, "diloco_elastic --sync-every 0", "sync_every is 0: it is a number of steps, at least 1"),
    (2, "diloco_elastic --outer-lr 0", "outer_lr is 0.0: it is a number above 0"),
    (2, "diloco_elastic --batch-size 7", "2 ranks cannot share a batch of 7 examples equally"),
    (2, "hsdp --shard-size 3", "--shard-size 3: it must divide the number of ranks, 2.$"),
    (2, "hsdp --shard-size 0", "--shard-size 0: it must divide the number of ranks, 2.$"),
    (3, "hsdp --batch-size 12", "The machines have 2, 1 ranks, and hybrid sharding needs equally many"),
]  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
@on_ranks("n", timeout=60)
def test_options_that_do_not_fit_are_refused_in_a_sentence_on_all_ranks(
    cluster: Cluster, n: int, tmp_path: Path
):
    folder = tmp_path / "new"

    os.environ[VARIABLE] = "aab"[cluster.rank] if n == 3 else "a"
    for ranks, words, sentence in REFUSED:
        if ranks == n:
            options = ("--checkpoint", str(folder)) if words.startswith("expert") else ()
            mode, *own = words.split()
            with pytest.raises(WorkbookError, match=f"^{sentence}") as refusal:
                train(cluster, mode, *SHORT, *own, *options)
            assert "\n" not in str(refusal.value)
    assert not folder.exists()


def test_on_two_ranks_all_wrappers_end_with_the_same_bits_and_microbatches_change_rounding_only():
    # a + b is b + a, and both are halved exactly.
    cnn = "data_parallel_ddp --model baby_cnn --batch-size 240 --lr 1e-2"
    names = ("naive_grad_accumulation", "overlap", "bucket_overlap", "ddp")
    modes = [*(f"data_parallel_{name}" for name in names), cnn]

    def work(cluster: Cluster) -> list[dict[str, Report]]:
        return [{mode: run(cluster, mode, "--grad-acc-steps", n) for mode in modes} for n in "12"]

    full, in_parts = run_ranks(work, 2)[0]
    alone = run_ranks(lambda cluster: run(cluster, cnn), 1)[0]
    for found in (full, in_parts):
        assert found[cnn]["last_loss"] == pytest.approx(alone["last_loss"], rel=1e-4)
        assert len({report["replica_digest"] for mode, report in found.items() if mode != cnn}) == 1
    for mode, report in in_parts.items():
        assert report["replica_digest"] != full[mode]["replica_digest"]
        assert report["last_loss"] == pytest.approx(full[mode]["last_loss"], rel=1e-4)
        assert report["bytes_sent"] == full[mode]["bytes_sent"]
        assert report["predicted_step_seconds"] >= report["compute_seconds"] * (1 - 1e-9) > 0
        assert 0 <= report["hidden_share"] <= 1 and report["communication_seconds"] > 0


def test_under_the_metronome_all_scripts_but_naive_hide_communication_and_their_traces_show_it(
    tmp_path: Path,
):
    slow = ("--metronome", "5ms", "--link", "200mbit,0.1ms", "--steps", "6")
    modes = {
        "naive": f"data_parallel_naive --trace {tmp_path}/naive",
        "overlap": "data_parallel_overlap",
        "bucket": f"data_parallel_bucket_overlap --bucket-mb 0.02 --trace {tmp_path}/bucket",
        "ddp": "data_parallel_ddp --bucket-mb 0.02",
    }

    def work(cluster: Cluster) -> dict[str, Report]:
        return {name: run(cluster, words, *slow) for name, words in modes.items()}

    for found in run_ranks(work, 2):
        assert found["naive"]["hidden_share"] == 0
        for name, report in found.items():
            assert name == "naive" or report["hidden_share"] > 0
            assert report["step_seconds"] >= 2 * 3 * 0.005  # forward and backward of two layers
            assert report["communication_seconds"] >= report["bytes_sent"] / 6 / 25e6 * 0.99
            assert report["first_loss"] == report["last_loss"]  # nothing is computed
    for name in ("naive", "bucket"):
        [picture], [trace] = ([*(tmp_path / name).glob(f"*{end}")] for end in (".png", ".json"))
        assert picture.read_bytes().startswith(b"\x89PNG")
        rows = json.loads(trace.read_text())["traceEvents"]
        ranks = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
        assert sorted(ranks.values()) == ["rank 0", "rank 1"]
        expected = {"forward", "backward", "communication", "optimizer"}
        for pid in ranks:
            mine = [row for row in rows if row["ph"] == "X" and row["pid"] == pid]
            launches = {"launch", "wait"} if name != "naive" else set()
            assert {row["cat"] for row in mine} == expected | launches
            assert [row["name"] for row in mine].count("forward") == 3  # of the steps after the warm-up


def test_replicas_that_train_alone_drift_apart_and_one_does_not(capfd):
    def work(cluster: Cluster) -> None:
        train_alone.main(cluster, train_alone.Args(epochs=5, steps=2, json=True))

    for world_size in (3, 1):
        run_ranks(work, world_size)
        captured = capfd.readouterr()
        summary = json.loads(captured.out.strip().splitlines()[-1].removeprefix("[rank 0] "))
        assert summary["replicas_equal"] is (world_size == 1)
        assert len(summary["drift"]) == world_size and summary["steps"] == 2
        assert all((drift > 1e-5) == (world_size > 1) for drift in summary["drift"])
    assert re.findall(r"│ (\d+) +│ \d\.\d{3} +│", captured.err) == ["1"]  # no epoch after the last step


@on_ranks(2)
def test_numbers_out_of_range_and_a_batch_that_ranks_that_train_alone_do_not_divide_are_refused(
    cluster: Cluster,
):
    for name, value, sentence in (
        ("steps", -1, r"--steps -1: .*\."),
        ("epochs", -1, r"--epochs -1: .*\."),
        ("batch_size", 25, "2 ranks cannot share a batch of 25 .* equally; .* such as --batch-size 26"),
    ):
        with pytest.raises(WorkbookError, match=sentence):
            train_alone.main(cluster, train_alone.Args(**{name: value}))


def test_documents_change_the_loss_and_cuts_kernels_attentions_and_ranks_do_not():
    def losses(cluster: Cluster) -> list[list[float]]:
        textbook = "context_ring --length 20 --cut contiguous --kernel textbook --pattern tree"
        rings = [run(cluster, words) for words in ("context_ring --length 20", textbook)]
        documents = [run(cluster, f"context_{how} --length 20 --documents") for how in ("ring", "all_to_all")]
        return [[one["last_loss"] for one in group] for group in (rings, documents)]

    [[rings, documents]], [on_two, *_] = run_ranks(losses, 1), run_ranks(losses, 2)
    for found, expected in zip(on_two, (rings, documents), strict=True):
        assert [*found, *expected] == pytest.approx([expected[0]] * 4, rel=1e-5)
    assert documents[0] != pytest.approx(rings[0], rel=1e-5)


@on_ranks(3)
def test_under_the_metronome_a_rings_messages_are_those_of_training_and_nothing_is_trained(cluster: Cluster):
    trained = run(cluster, "context_ring --length 20 --cut contiguous")
    clocked = run(cluster, "context_ring --length 20 --cut contiguous --metronome 4ms")
    assert clocked["bytes_sent"] == trained["bytes_sent"] > 0
    assert clocked["last_loss"] is None


PIPELINES = {
    "naive": "pipeline_model_parallel",
    "gpipe": "pipeline_afab",
    "1f1b by hand": "pipeline_1f1b_by_hand",
    "1f1b": "pipeline_1f1b",
    "interleaved": "pipeline_interleaved",
    "zb_h1": "pipeline_zero_bubble",
    "zb_v": "pipeline_zero_bubble --schedule zb_v",
    "dualpipe_v": "pipeline_zero_bubble --schedule dualpipe_v",
}


def pipeline(cluster: Cluster, name: str, *options: str) -> Report:
    return run(cluster, f"{PIPELINES[name]} {PIPELINE}", *options)


def test_a_report_has_what_the_schedule_holds_and_how_long_ranks_are_idle():
    def work(cluster: Cluster) -> dict[str, Report]:
        found = {name: pipeline(cluster, name) for name in PIPELINES}
        return found | {
            f"{name} recomputed": pipeline(cluster, name, "--recompute") for name in ("gpipe", "zb_h1")
        }

    found, other = run_ranks(work, 2)
    for name in PIPELINES:
        schedule = name.removesuffix(" by hand")
        held = [theory.most_held(schedule, 2, 4, stages_per_rank(schedule), rank) for rank in range(2)]
        assert found[name]["microbatches_held"] == held, name
        assert 0 <= found[name]["bubble"] < 1 and 0 <= found[name]["bubble_formula"] < 1
    assert "bubble" not in other["1f1b"], "the report is rank 0's"
    bytes_of = {name: max(one["activations_bytes"]) for name, one in found.items()}
    assert bytes_of["1f1b"] == bytes_of["1f1b by hand"] < 0.6 * bytes_of["gpipe"]
    assert bytes_of["gpipe recomputed"] < 0.3 * bytes_of["gpipe"]
    assert bytes_of["zb_h1 recomputed"] > 0.5 * bytes_of["zb_h1"]  # what a W needs is kept anyway
    for name in ("gpipe", "zb_h1"):
        assert found[f"{name} recomputed"]["last_loss"] == pytest.approx(found[name]["last_loss"], rel=1e-5)


def test_the_metronome_replaces_computing_and_takes_no_less_than_the_formula_and_a_slow_link_more():
    clock = ("--metronome", "2ms")

    def work(cluster: Cluster) -> tuple[list[Report], Report]:
        slow = pipeline(cluster, "1f1b", *clock, "--link", "1gbit,8ms")
        return [pipeline(cluster, name, *clock) for name in PIPELINES], slow

    fast, slow = run_ranks(work, 2)[0]
    for name, one in zip(PIPELINES, fast, strict=True):
        schedule = name.removesuffix(" by hand")
        formula = theory.makespan(schedule, 2, 4, stages_per_rank(schedule), 0.002, 0.002, 0.002)
        assert one["makespan_seconds"] >= 0.97 * formula, name
        assert "activations_bytes" not in one and one["first_loss"] is None
    formula = theory.makespan("1f1b", 2, 4, 1, 0.002, 0.002, 0.002)
    assert slow["makespan_seconds"] > formula + 0.014  # an activation, and a gradient back


def test_a_pipelines_trace_is_compared_with_the_simulation_the_formula_and_all_schedules(
    tmp_path: Path, capsys
):
    options = ("--trace", str(tmp_path), "--metronome", "2ms")

    def work(cluster: Cluster) -> dict[str, str] | None:
        with mock.patch("training.report.print_report") as printed:
            pipeline(cluster, "interleaved", *options)
        return printed.call_args.kwargs["rows"]

    command = run_ranks(work, 2)[0]["compare by"]
    capsys.readouterr()
    [picture], [trace] = (tmp_path.glob(f"pipeline_interleaved_*{end}") for end in (".png", ".json"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert command == f"python pipeline_parallel/analysis/compare.py {tmp_path}"
    compare.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "interleaved, 2 ranks, 4 microbatches"
    assert [line.split()[0] for line in lines[2:5]] == ["measured", "simulated", "formula"]
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")
    assert "measured interleaved" in (tmp_path / "schedules.html").read_text()
    trace.write_text('{"traceEvents": []}')
    with pytest.raises(SystemExit, match="has no actions of a pipeline"):
        compare.main(tmp_path)
