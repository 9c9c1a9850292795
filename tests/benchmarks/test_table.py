"""The table of benchmarks/table.py: what it runs, how it counts, and that the READMEs show what is stored."""

import copy
import itertools
import json
import re
from pathlib import Path

import pytest
import tyro

from benchmarks import table, table_pages, table_plots, table_runs
from benchmarks.table import Args, chosen, main, plan_in_words
from benchmarks.table_pages import full_page, limits, short_page
from benchmarks.table_runs import (
    BATCH_SIZE,
    LINKS,
    MAXIMA,
    MOE,
    SIZE,
    TECHNIQUES,
    VANILLA,
    Job,
    jobs_of,
    run_job,
    tokens_per_step,
)
from expert_parallel.config import form_groups
from expert_parallel.train_moe import ExpertParallel
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPT, GPTConfig
from lab.ranks import RankError, run_ranks
from tests.benchmarks.table_results import AXES, made_up
from tests.run_modes import SCRIPTS, start_of

NAIVE = next(one for one in TECHNIQUES if one.run_mode == "data_parallel_naive")


def test_the_readmes_and_pictures_show_the_stored_results():
    main(Args(check=True))


def test_every_technique_is_run_by_the_script_of_its_lesson():
    scripts = {one.run_mode: one.script for one in TECHNIQUES if one != VANILLA}
    assert len(scripts) > 15 and scripts.items() <= SCRIPTS.items()


def test_one_worker_has_no_link_and_no_pipeline():
    alone = [job for job in jobs_of(TECHNIQUES, (1, 2), LINKS) if job.workers == 1]
    assert {job.link for job in alone} == {"loopback"}
    names = {job.technique.name for job in alone}
    assert {"vanilla", "naive", "ZeRO 3"} <= names and not names & {"1F1B", "auto", "naive ring"}
    assert [job.workers for job in jobs_of([VANILLA], (1, 2, 4), LINKS)] == [1]


def test_a_run_is_caught_from_the_script_itself(monkeypatch):
    monkeypatch.setattr(table_runs, "SIZE", "tiny")
    figures = run_job(Job(NAIVE, 2, "loopback"), steps=1)
    sent = sum(4 * parameter.numel() for parameter in GPT(GPTConfig.named("tiny")).parameters())
    assert sent < figures["bytes_per_step"] < 1.05 * sent  # 2 (n-1)/n of the gradients, and some headers
    seconds = tokens_per_step() / figures["tokens_per_second"]
    rounding = 1 + 1e-9  # both are the same time if one rank starts first and ends last
    assert figures["step_seconds"] <= seconds * rounding < figures["step_seconds"] + 10.0
    assert 0 < figures["memory_bytes"] < figures["peak_memory_bytes"]


def test_the_time_of_a_run_is_from_the_first_ranks_start_to_the_last_ranks_end(monkeypatch):
    same = {"steps": 2, "plan": {}} | dict.fromkeys(MAXIMA, 1.0)
    ranks = [
        same | {"start": 1_000_000_000, "end": 4_000_000_000, "memory_bytes": 7},
        same | {"start": 1_500_000_000, "end": 5_000_000_000},
    ]
    monkeypatch.setattr(table_runs, "run_ranks", lambda *_, **__: ranks)
    figures = run_job(Job(NAIVE, 2, "loopback"), steps=4)
    assert figures["tokens_per_second"] == 2 * tokens_per_step() / 4
    assert figures["memory_bytes"] == 7


def test_a_run_that_fails_is_named_by_its_command(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RankError(1, "rank 1 failed")

    monkeypatch.setattr(table_runs, "run_ranks", fail)
    with pytest.raises(
        WorkbookError, match=r"RUN_MODE=data_parallel_naive WORLD_SIZE=2 (.|\n)*rank 1 failed"
    ):
        run_job(Job(NAIVE, 2, "1gbit"), steps=4)


def test_all_techniques_train_the_same_global_batch():
    block_size = GPTConfig.named(SIZE).block_size
    for job in jobs_of(TECHNIQUES, (2,), ["loopback"]):
        options = job.options(steps=4)
        if "--config" in options:
            continue  # its batch size is that of a device
        args = tyro.cli(start_of(job.technique.run_mode).arguments, args=options)
        assert (args.size, args.batch_size) == (SIZE, BATCH_SIZE)
        assert getattr(args, "length", block_size) == block_size


def test_the_parameters_with_experts_are_those_of_the_model_that_is_trained():
    def count(_: Cluster) -> int:
        return table.numel(ExpertParallel(GPT(GPTConfig.named("tiny")), MOE, form_groups(1)))

    assert run_ranks(count, 1) == [table.numel_with_experts(GPTConfig.named("tiny"))]


def test_the_table_compares_every_row_with_one_process():
    results = made_up()
    [vanilla] = [row for row in results["rows"] if row["what"] == "vanilla"]
    for row in results["rows"]:
        assert row["ratio"] == row["ours"] / row["theirs"]
        if row["what"] == "experts":
            assert (row["against"], row["theirs"]) == ("experts with 1 worker", 500.0)
        else:
            assert (row["against"], row["theirs"]) == ("vanilla", 1000.0)
    page = short_page(results)
    assert f"| {1000 + 20 * 4 + 2:,} ± 2 (1.08) |" in page  # naive with 2 workers at 1 Gbit/s is the fourth
    assert f"{vanilla['ours']:,.0f} ± 2 tokens per second" in page


def test_a_technique_that_trains_another_model_is_compared_with_its_own_run_on_one_worker():
    results = made_up()
    [alone, *others] = [row for row in results["rows"] if row["what"] == "experts"]
    assert alone["world_size"] == 1 and {row["world_size"] for row in others} == {2, 4}
    for page in (short_page(results), full_page(results)):
        assert "`experts` trains another model" in page and "500 tokens per second" in page
        marked = [line for line in page.splitlines() if line.startswith("|") and "*" in line]
        assert marked and all(line.startswith("| experts |") for line in marked)
        assert "as fast as vanilla" in page and "the fastest is auto" in page  # though experts have more
    quick = {(job.technique.name, job.workers) for job in chosen(Args(only=("experts",), quick=True))}
    assert quick == {("vanilla", 1), ("experts", 1), ("experts", 2)}


def test_results_from_before_a_technique_was_added_can_still_be_shown(tmp_path: Path):
    results = made_up()
    results["rows"] = [row for row in results["rows"] if row["what"] not in ("experts", "ring attention")]
    del results["setting"]["experts"]
    for page in (short_page(results), full_page(results)):
        assert "experts" not in page and "*" not in page and "all-to-all attention" in page
    table_plots.draw(results, tmp_path)
    drawn = (tmp_path / "memory.svg").read_text()
    assert "all-to-all attention" in drawn and "experts" not in drawn


def test_the_full_page_has_a_row_for_every_technique_at_every_place():
    page = full_page(made_up())
    parts = {part.partition("\n")[0]: part for part in page.split("### ")}
    for place in ("1 worker", "2 workers, loopback", "4 workers, 1 Gbit/s"):
        rows = re.findall(r"^\| (\S.*?) \|", parts[place], re.MULTILINE)[2:]
        assert set(rows) | {"vanilla"} == {one.name for one in TECHNIQUES}
    assert "| 1F1B | - | - |" in parts["1 worker"]
    assert "and ZeRO 3 (2 of 5 runs), 1 (pipeline) x 2 (data) x 1 (tensor) (1 of 5 runs), " in page
    for mode in {row["run_mode"] for row in made_up()["rows"]} - {"vanilla"}:
        assert f"RUN_MODE={mode} " in parts["The command of each row"]


@pytest.mark.parametrize(("cores", "at_most"), [(2, {2}), (4, set()), (64, set())])
def test_what_a_machine_cannot_show_follows_from_its_cores(cores: int, at_most: set[int]):
    rows = made_up(cores)["rows"]
    said = {
        int(n) for row in rows for text in limits(row, cores) for n in re.findall(r"larger than (\d+)", text)
    }
    assert said == at_most
    pipelines = [row for row in rows if "bubble" in "".join(limits(row, cores))]
    assert bool(pipelines) == bool(at_most)
    assert all(row["world_size"] == 4 and row["run_mode"].startswith("pipeline_") for row in pipelines)
    assert not limits(rows[0], cores)
    if cores == 64:
        assert not any(limits(row, cores) for row in rows)


def test_a_loaded_machine_is_named_on_the_pages():
    assert "Other programs" in short_page(made_up(load=3.0))
    assert "Other programs" not in short_page(made_up(load=0.2))


def test_a_change_of_the_results_makes_pages_and_pictures_stale(tmp_path, monkeypatch):
    pages = {table_pages.TOP: tmp_path / "TOP.md", table_pages.FULL: tmp_path / "FULL.md"}
    for name, path in zip(("TOP", "FULL"), pages.values(), strict=True):
        path.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
        monkeypatch.setattr(table_pages, name, path)
    monkeypatch.setattr(table_pages, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results" / "table.json")
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(made_up()))
    main(Args(stored=stored))
    main(Args(check=True))
    first = table.RESULTS.with_name("memory.svg").read_bytes()
    main(Args(stored=table.RESULTS))
    assert table.RESULTS.with_name("memory.svg").read_bytes() == first, "the same results make the same bytes"
    text = (tmp_path / "TOP.md").read_text()
    assert text.startswith("before\n") and text.endswith("-->\nafter\n") and "old" not in text
    changed = copy.deepcopy(made_up())
    changed["rows"][5]["runs"]["memory_bytes"][0] += 50_000_000
    table.RESULTS.write_text(json.dumps(changed))
    with pytest.raises(
        WorkbookError, match=r"FULL.md, results/tokens_per_second.svg, results/memory.svg: not"
    ):
        main(Args(check=True))


def test_the_planner_s_choice_is_said_in_words():
    assert plan_in_words(AXES) == "1 (pipeline) x 2 (data) x 1 (tensor) and ZeRO 3"
    more = {"axis_pipeline": 2, "axis_zero": 0, "axis_microbatches": 8, "axis_recompute": True}
    words = "2 (pipeline) x 2 (data) x 1 (tensor) and 1f1b with 8 microbatches and recomputation"
    assert plan_in_words(AXES | more) == words


def test_some_techniques_can_be_chosen_and_vanilla_is_always_measured():
    jobs = chosen(Args(only=("ZeRO-3", "1f1b")))
    assert {job.technique.name for job in jobs} == {"vanilla", "ZeRO 3", "1F1B"}
    quick = chosen(Args(quick=True))
    assert {job.workers for job in quick if job.technique != VANILLA} == {2}
    assert len(quick) == len(set(itertools.chain(quick))) < 15


def test_a_page_without_marks_is_refused():
    with pytest.raises(WorkbookError, match="must have the marks"):
        table_pages.marked("no marks")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (Args(only=("zero-4",)), "There is no technique 'zero-4': choose among vanilla, naive, "),
        (Args(runs=0), "--runs and --steps are numbers of at least 1"),
        (Args(stored=table.RESULTS.parent / "none.json"), "cannot be read as stored results"),
        (Args(stored=table_pages.ROOT / "CITATION.cff"), "cannot be read as stored results"),
    ],
)
def test_a_wrong_option_is_one_sentence(args: Args, sentence: str):
    with pytest.raises(WorkbookError, match=sentence):
        main(args)
