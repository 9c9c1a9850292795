"""The calculator of memory and step time computes what the lessons' formulas compute."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from comm import cost
from context_parallel.makespan import ring_passes
from expert_parallel.train_moe import Router
from hybrid_parallel.planner.memory import layer_activations
from hybrid_parallel.planner.shapes import ModelShape
from hybrid_parallel.sizes import ParallelSizes
from lab.cluster import Cluster
from lab.models.model import GPT, SIZES, FeedForward, GPTConfig
from lab.ranks import run_ranks
from low_communication.compressors import COMPRESSORS
from low_communication.train_local_sgd import LocalSGD
from pipeline_parallel.analysis import theory
from pipeline_parallel.schedules import SCHEDULES, stages_per_rank
from tests.browser import Browser
from training import predict
from training.arguments import OPTIMIZERS
from zero import memory as zero_memory

LINK = cost.Link(alpha=20e-6, beta=8e-11)  # as the page opens
COSTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1.5, 1.25), (1, 1, 3)]  # f, i, w


@pytest.fixture(scope="module")
def page(pages: Path) -> Path:
    return pages / "calculator.html"


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    return browser


def cell(browser: Browser, table: str, row: str) -> str:
    """Return the text of a row's last cell."""
    rows = f"[...document.querySelectorAll('#{table}-table tbody tr')]"
    return browser.js(f"{rows}.find(tr => tr.cells[0].textContent === '{row}').lastElementChild.textContent")


def type_into(browser: Browser, name: str, text: str) -> None:
    browser.js(f"{name}.value = {text!r}; {name}.dispatchEvent(new Event('input', {{bubbles: true}}))")


def test_the_number_of_parameters_is_that_of_the_workbooks_gpt(opened):
    configs = [*SIZES.values(), GPTConfig(vocab_size=11, block_size=7, num_layers=3, num_heads=2, width=6)]
    for config in configs:
        sizes = {"layers": config.num_layers, "width": config.width}
        sizes |= {"vocabulary": config.vocab_size, "context": config.block_size}
        with torch.device("meta"):
            true = sum(parameter.numel() for parameter in GPT(config).parameters())
        assert opened.json(f"parametersOf({json.dumps(sizes)})") == true


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_is_that_of_the_zero_formulas(opened, optimizer: str):
    _, _, states = OPTIMIZERS[optimizer]
    full = zero_memory.of_one_process([zero_memory.Share(full=1000, mine=1000)], states)
    shown = opened.json(f"ofOneProcess(1000, 'float32', '{optimizer}')")
    assert shown == {
        "parameters": full.parameters, "gradients": full.gradients, "optimizer": full.optimizer_state,
    }  # fmt: skip
    for stage in range(4):
        for ranks in (1, 2, 3, 8):
            held = zero_memory.formula(stage, full, ranks)
            shown = opened.json(f"zeroHeld({stage}, {json.dumps(shown_full(full))}, {ranks})")
            expected = (held.parameters, held.gradients, held.optimizer_state)
            assert list(shown.values()) == pytest.approx(expected)


def shown_full(full: zero_memory.Held) -> dict[str, float]:
    return {"parameters": full.parameters, "gradients": full.gradients, "optimizer": full.optimizer_state}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_idle_time_and_microbatches_held_are_those_of_the_schedules_theory(opened, schedule: str):
    chunks = stages_per_rank(schedule)
    assert opened.json(f"SCHEDULES['{schedule}'].chunks") == chunks
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 4, 7, 8, 16, 33):
            for costs in COSTS:
                shown = opened.json(f"idleSeconds('{schedule}', {p}, {m}, {', '.join(map(str, costs))})")
                expected = theory.idle(schedule, p, m, chunks, *costs)
                assert shown == (None if expected is None else pytest.approx(expected)), (p, m, costs)
            for rank in range(p):
                shown = opened.json(f"heldMicrobatches('{schedule}', {p}, {m}, {rank})")
                assert shown == theory.most_held(schedule, p, m, chunks, rank), (p, m, rank)


def test_experts_take_the_place_of_a_layers_feed_forward(opened):
    config, experts = GPTConfig(vocab_size=11, block_size=7, num_layers=3, num_heads=2, width=6), 4
    with torch.device("meta"):
        model, one = GPT(config), sum(p.numel() for p in FeedForward(config).parameters())
        router = sum(p.numel() for p in Router(config.width, experts, 2).parameters())
    of_model = sum(parameter.numel() for parameter in model.parameters())
    sizes = json.dumps({"layers": 3, "width": 6, "vocabulary": 11, "context": 7, "experts": experts})
    assert opened.json(f"expertParametersOf({sizes})") == 3 * experts * one
    assert opened.json(f"denseParametersOf({sizes})") == of_model - 3 * one + 3 * router


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("experts", [1, 8])
@pytest.mark.parametrize("context", [1, 2])
def test_activations_and_waiting_are_those_of_the_planner(opened, tensor: int, experts: int, context: int):
    active, link = 2 if experts > 1 else 1, "{alpha: 20e-6, beta: 8e-11}"
    shape = ModelShape(100, 32, 3, 8, None, 64, 0.1, experts=experts, active_experts=active)
    for by_tokens, keeps in product((False, True), repeat=2):
        sizes = ParallelSizes(tensor=tensor, context=context, sequence_parallel=by_tokens, precision="bf16")
        settings = {
            "batch": 3, "sequence": 32, "width": 64, "heads": 8, "precision": "bf16", "keepsAttention": keeps,
            "tensorRanks": tensor, "contextRanks": context, "expertRanks": 4, "sequenceParallel": by_tokens,
            "experts": experts, "activeExperts": active,
        }  # fmt: skip
        given, tokens = json.dumps(settings), 3 * 32 / context
        kept = layer_activations(replace(shape, fused_attention=not keeps), sizes)
        assert opened.json(f"layerActivations({given})") == pytest.approx(tokens * kept)
    stream = round(tokens * 64 * 2)
    one = cost.seconds("all_reduce", "ring", stream, tensor, LINK)
    reductions = 1 + active  # after attention and after each expert
    assert opened.json(f"tensorSeconds({given}, {link})") == pytest.approx(reductions * one)
    there = cost.seconds("all_to_all", "pairwise", stream * active, 4, LINK) * (experts > 1)
    assert opened.json(f"expertSeconds({given}, {link})") == pytest.approx(2 * there)
    message = LINK.alpha + LINK.beta * 2 * stream / tensor
    forward, backward = ring_passes([0.0] * context, message)
    shown = opened.json(f"contextSeconds({given}, {link})")
    assert [shown, 2 * shown] == pytest.approx([forward, backward])


def test_all_axes_divide_what_a_rank_holds(browser: Browser, page: Path):
    axes = "dataRanks=8&pipelineRanks=2&tensorRanks=4&contextRanks=2&experts=8&activeExperts=2&expertRanks=4"
    browser.open(page, f"layers=32&heads=32&width=4096&{axes}")
    shown = browser.json("[results(set), denseParametersOf(set), expertParametersOf(set)]")
    result, dense, experts = shown
    of_rank = [(dense / 8, 16), (experts / 32, 4)]  # parameters, and the ranks that hold the same ones
    held = [zero_memory.formula(1, zero_memory.Held(2 * n, 2 * n, 12 * n), ranks) for n, ranks in of_rank]
    assert result["ranks"] == 128
    assert list(result["stages"][1].values()) == pytest.approx(
        [sum(each.parameters for each in held), sum(each.gradients for each in held),
         sum(each.optimizer_state for each in held)]
    )  # fmt: skip
    assert cell(browser, "time", "experts, waiting") and cell(browser, "time", "tensor parallel, waiting")
    assert cell(browser, "time", "context parallel communication").endswith("ms")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("contextRanks=3", "context c: give a number that divides the 1024 tokens of a text."),
        ("tensorRanks=2", "tensor t: give a number that divides the 25 heads."),
        ("experts=6&expertRanks=4", "expert e: give a number that divides the 6 experts."),
        ("experts=6&activeExperts=7", "experts of a token k: give at most 6, the number of experts."),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(
    browser: Browser, page: Path, settings: str, said: str
):
    browser.open(page, settings)
    assert browser.js("complaint.textContent") == said


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_traffic_and_its_time_are_those_of_the_cost_formulas(opened, stage: int, ranks: int):
    size, m, itemsize = 4800, 5, 4
    operations = {
        0: {"all_reduce": 1},
        1: {"reduce_scatter": 1, "all_gather": 1},
        2: {"reduce_scatter": m, "all_gather": 1},
        3: {"reduce_scatter": m, "all_gather": 2 * m},
    }[stage]
    full = json.dumps({"parameters": size * itemsize, "gradients": size * itemsize})
    collectives = f"collectivesOf({stage}, {full}, {m})"
    sent = [
        cost.traffic(op, "ring", size, itemsize, ranks, 0).bytes_sent * times
        for op, times in operations.items()
    ]
    assert opened.json(f"bytesSent({collectives}, {ranks})") == pytest.approx(sum(sent))
    seconds = [
        cost.seconds(op, "ring", size * itemsize, ranks, LINK) * times for op, times in operations.items()
    ]
    link = f"{{alpha: {LINK.alpha!r}, beta: {LINK.beta!r}}}"
    assert opened.json(f"secondsSent({collectives}, {ranks}, {link})") == pytest.approx(sum(seconds))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_lasts_as_long_as_the_lessons_predict(browser: Browser, page: Path, schedule: str):
    browser.open(
        page, f"schedule={schedule}&pipelineRanks=4&microbatches=8&dataRanks=8&stage=0&precision=float32"
    )
    shown = browser.json("results(set)")
    f, i, w = (shown[each] for each in "fiw")
    makespan = theory.makespan(schedule, 4, 8, stages_per_rank(schedule), f, i, w)
    num_bytes = round(shown["full"]["gradients"])

    def wire(size: int) -> float:
        return cost.seconds("all_reduce", "ring", size, 8, LINK)

    assert makespan is not None
    expected = [predict.step_seconds(makespan, 0.0, [(ready, num_bytes)], wire) for ready in (makespan, 0.0)]
    assert [shown["apart"], shown["together"]] == pytest.approx(expected)
    assert f == pytest.approx(2 * shown["parameters"] / 4 * 4 * 1024 / 100e12)
    assert "on 32 ranks" in browser.js("summary.textContent")


def test_tables_show_the_results_in_words(browser: Browser, page: Path):
    browser.open(
        page,
        "pipelineRanks=1&dataRanks=4&stage=3&precision=float32&optimizer=adamw&model=parameters&parameters=1e9",
    )
    held = zero_memory.formula(3, zero_memory.Held(4e9, 4e9, 8e9), 4)
    assert cell(browser, "memory", "parameters") == f"{held.parameters / 1e9:g} GB"
    assert cell(browser, "memory", "optimizer state") == f"{held.optimizer_state / 1e9:g} GB"
    assert cell(browser, "time", "bytes that a rank sends for it") == f"{8 * 3 * 3 / 4 * 4:g} GB"
    assert browser.js("summary.textContent").startswith(
        "1 billion parameters on 4 ranks. A rank needs 4 GB of its 40 GB."
    )
    type_into(browser, "capacity", "3")
    assert "needs 4 GB, and has only 3 GB" in browser.js("summary.textContent")


SEVEN_BILLION = "layers=32&width=4096&vocabulary=50257&context=2048&sequence=2048&dataRanks=8&pipelineRanks=1"


def test_all_ways_to_use_the_ranks_are_compared_and_one_is_chosen(browser: Browser, page: Path):
    browser.open(page, SEVEN_BILLION + "&capacity=80e9")
    buttons = "[...document.querySelectorAll('#splits button')]"
    ways = browser.json(f"{buttons}.map(each => [JSON.parse(each.dataset.way), each.innerText.split('\\n')])")
    assert sorted({(way["pipelineRanks"], way["dataRanks"]) for way, _ in ways}) == [
        (1, 8), (2, 4), (4, 2), (8, 1),
    ]  # fmt: skip
    assert {way["dataRanks"] * way["microbatches"] for way, _ in ways} == {64}, "the same texts in a step"
    assert f"{sum(time != 'too much' for _, (_, time) in ways)} of 32 ways fit" in browser.js(
        "document.getElementById('splits-words').textContent"
    )
    for i in (0, 9, 18, 27):
        way, (needed, time) = ways[i]
        browser.js(f"{buttons}[{i}].click()")
        assert browser.js("Number(dataRanks.value)") == way["dataRanks"]
        assert browser.js("document.querySelector('[name=stage]:checked').value") == str(way["stage"])
        said = browser.js("summary.textContent")
        assert f"needs {needed}" in said and f"{'' if time == 'too much' else f'takes {time} if '}" in said
        assert browser.js("JSON.parse(document.activeElement.dataset.way)") == way, "the focus stays"
        assert browser.js("document.querySelectorAll('[aria-pressed=true]').length") == 1


def test_an_example_fills_the_form_and_what_is_wrong_is_named(browser: Browser, page: Path):
    browser.open(page, "model=parameters")
    assert browser.js("document.getElementById('of-layers').hidden")
    browser.click('[name="preset"][value="GPT-2"]')
    assert browser.js("[layers.value, width.value, model.hidden]") == ["12", "768", False]
    assert browser.js("summary.textContent").startswith("124.4 million parameters")
    type_into(browser, "layers", "1.5")
    assert browser.js("complaint.textContent") == "layers: give a whole number from 1 to 10000."
    assert browser.js("layers.getAttribute('aria-invalid')") == "true"
    assert browser.js("summary.textContent").startswith("124.4 million parameters"), "the last good number"
    type_into(browser, "layers", "24")
    assert browser.js("complaint.textContent") == ""


def test_a_step_whose_link_is_slower_than_its_ranks_is_not_said_to_hide_all(browser: Browser, page: Path):
    browser.open(page, "stage=3&pipelineRanks=1&dataRanks=32&model=parameters&rate=1")
    said = browser.js("document.getElementById('summary').textContent")
    assert "overlaps with computing as far as it can (here the link is slower)" in said
    browser.open(page, "stage=0&pipelineRanks=1&dataRanks=1&model=parameters")
    assert "slower" not in browser.js("document.getElementById('summary').textContent")


TINY = "layers=2&width=32&heads=4&vocabulary=256&context=32&sequence=32&precision=float32&pipelineRanks=1"
WAYS = ("bf16", "int8", "topk", "powersgd", "localSgd", "diloco", "streaming", "hsdp")


def tiny_traffic(cluster: Cluster) -> dict[str, float]:
    """Return the bytes of a step of the tiny GPT: of each compressor, and of local SGD."""
    gpt = GPT(GPTConfig.named("tiny"))
    shapes = [parameter.shape for parameter in gpt.parameters()]
    names = ("bf16", "int8", "topk", "powersgd")
    sent = {name: COMPRESSORS[name](shapes).traffic().bytes_sent for name in names}
    optimizer = torch.optim.SGD(gpt.parameters())
    average = LocalSGD(gpt, 32).traffic(optimizer)
    return {**sent, "localSgd": average.bytes_sent / 32}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_each_way_to_send_less_sends_is_what_the_lesson_expects(
    browser: Browser, page: Path, ranks: int
):
    browser.open(page, f"{TINY}&dataRanks={ranks}")
    shown = browser.json("waysOf(set)")
    of_ranks = run_ranks(tiny_traffic, ranks)
    for way, sent in of_ranks[0].items():  # ranks' shards differ by one number at most
        mean = sum(each[way] for each in of_ranks) / ranks
        assert shown[way]["sent"] == pytest.approx(mean, rel=1e-9), (way, sent)
    assert shown["diloco"]["sent"] == shown["streaming"]["sent"] == shown["localSgd"]["sent"]
    num_bytes = browser.json(f"int8Bytes({{numbers: results(set).parameters, ranks: {ranks}}})")
    both = [("all_to_all", "pairwise"), ("all_gather", "ring")]
    wire = sum(cost.seconds(op, pattern, num_bytes, ranks, LINK) for op, pattern in both)
    assert shown["int8"]["wire"] == pytest.approx(wire)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_hybrid_shards_cost_a_machines_collectives_and_an_all_reduce_on_its_link(
    browser: Browser, page: Path, microbatches: int
):
    browser.open(page, f"{TINY}&dataRanks=8&machineRanks=4&microbatches={microbatches}")
    result, hsdp = browser.json("[results(set), waysOf(set).hsdp]")
    num_bytes, shard = 4 * result["parameters"], result["parameters"] // 4
    assert hsdp["sent"] == 4 * cost.traffic("all_reduce", "ring", shard, 4, 2, 0).bytes_sent
    assert hsdp["memory"] == 4 * num_bytes / 4  # parameters, gradients, two averages
    fast = cost.Link(LINK.alpha, 8e-9 / 2000)
    within = {"all_gather": 2 * microbatches, "reduce_scatter": microbatches}
    wire = sum(times * cost.seconds(op, "ring", num_bytes, 4, fast) for op, times in within.items())
    shared = cost.Link(LINK.alpha, 4 * LINK.beta)
    wire += cost.seconds("all_reduce", "ring", 4 * shard, 2, shared)
    assert hsdp["wire"] == pytest.approx(wire)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_pays_below_the_rate_that_is_shown(browser: Browser, page: Path, way: str):
    browser.open(page, f"{TINY}&dataRanks=4&machineRanks=2&flops=1e11")
    shown, makespan = browser.json("[waysOf(set), results(set).makespan]")
    plain, wire, step = shown["plain"], shown[way]["wire"], shown[way]["step"]
    assert plain["step"] == max(makespan, plain["wire"])
    assert step == pytest.approx(makespan + wire if way in ("localSgd", "diloco") else max(makespan, wire))
    rate = browser.json(f"stopsAt(set, '{way}')")
    below, above = browser.json(f"[0.99, 1.01].map(times => shareAt(set, times * {rate}, '{way}'))")
    assert below < 1 <= above + 1e-6


def test_what_sends_less_is_compared_for_what_is_set(browser: Browser, page: Path):
    browser.open(page, f"{TINY}&dataRanks=4&machineRanks=3&rate=0.2")
    assert cell(browser, "less", "plain data parallel") == "1"
    assert cell(browser, "less", "HSDP, g = 3") == ""
    assert "give a number g that divides n" in browser.js("document.getElementById('less-table').textContent")
    type_into(browser, "syncEvery", "100")
    assert 0 < float(cell(browser, "less", "DiLoCo, H = 100")) < 1
    type_into(browser, "dataRanks", "1")
    assert browser.js("document.getElementById('less-tables').hidden")
    browser.open(page, "model=parameters&pipelineRanks=1")
    assert cell(browser, "less", "PowerSGD, r = 4") == ""
    assert browser.errors == []
