"""The configuration of a hybrid training: what the keys mean, and the sentence for each kind of mistake."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.script import Usage
from hybrid_parallel.arguments import HybridArgs, model_of, sizes_of
from hybrid_parallel.config import Config, load, main, read_command_line, split_config, validate_world_size
from hybrid_parallel.settings import KEYS
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig
from tests.run_modes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Load a configuration from its text, as the file c.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str | bytes, *overrides: str, **options: Any) -> Config:
        Path("c.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load("c.yaml", overrides, **options)

    return load_text


def axes(config: Config) -> tuple[int, ...]:
    return config.args.pipeline, config.args.data, config.args.tensor


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_of_the_repository_makes_sense(path: Path):
    config = load(str(path))
    assert config.num_processes in (4, 8)
    assert config.auto == (path.stem == "auto")
    if not config.auto:
        args, number = config.args, config.num_processes
        refuse_sizes(sizes_of(args, number), model_of(args), args.batch_size, number, args.experts)


def test_the_configurations_of_the_repository_are_what_their_names_say():
    args = {path.stem: load(str(path)).args for path in CONFIGS}
    sizes = {name: (one.pipeline, one.data, one.tensor, one.zero) for name, one in args.items()}
    assert sizes == {
        "auto": (1, None, 1, 0),  # still open
        "config": (2, 2, 2, 1),
        "context_and_experts": (2, 2, 1, 0),  # and 2 along context
        "data_parallel": (1, 4, 1, 0),
        "pipeline_and_data": (2, 2, 1, 1),
        "three_axes": (2, 2, 2, 1),
        "zero3": (1, 4, 1, 3),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num_gpus: 4", (1, 4, 1)),
        ("num_gpus: 4\npipeline_parallelism: False", (1, 4, 1)),
        ("num_gpus: 4\npipeline_parallelism: True", (2, 2, 1)),
        ("num_gpus: 3\npipeline_parallelism: True", (3, 1, 1)),
        ("num_gpus: 8\npipeline_parallelism: True\ndata: 1", (8, 1, 1)),
        ("num_gpus: 8\npipeline_parallelism: True\ndata: 2\ntensor: 2", (2, 2, 2)),
        ("num_gpus: 8\npipeline_parallelism: 4", (4, 2, 1)),
        ("num_gpus: 8\npipeline: 4\ndata: None", (4, 2, 1)),
        ("num_gpus: 6\npipeline: 3\ntensor: 2", (3, 1, 2)),
    ],
)
def test_the_axes_are_what_is_given_and_data_is_what_is_left(read, text: str, expected: tuple[int, ...]):
    assert axes(read(text)) == expected


@pytest.mark.parametrize(
    ("zero", "pipeline", "expected"),
    [("True", "True", 1), ("True", "False", 2), ("True", 1, 2), ("False", "True", 0), (1, 2, 1), (3, 1, 3)],
)
def test_zero_redundancy_without_a_number_depends_on_the_pipeline(read, zero, pipeline, expected):
    config = read(f"num_gpus: 4\nzero_redundancy: {zero}\npipeline_parallelism: {pipeline}")
    assert config.args.zero == expected
    beside_tokens = "num_gpus: 4\nzero_redundancy: True\ntensor: 2\nsequence_parallel: True"
    assert read(beside_tokens).args.zero == 2


def test_the_batch_is_per_device_and_the_devices_of_a_replica_share_theirs(read):
    assert read("num_gpus: 8\nbatch_size: 6\ntensor: 2\npipeline: 2").args.batch_size == 12
    assert read("num_gpus: 8\nbatch_size: 6").args.batch_size == 48


def test_a_pipeline_has_about_four_microbatches_per_stage_unless_their_number_is_given(read):
    assert read("num_gpus: 4\nbatch_size: 24\npipeline: 2").args.microbatches == 8
    assert read("num_gpus: 4\nbatch_size: 7\npipeline: 2").args.microbatches == 7
    assert read("num_gpus: 4\nbatch_size: 24").args.microbatches == 1
    assert read("num_gpus: 4\nbatch_size: 24\npipeline: 2\nmicrobatches: 3").args.microbatches == 3


def test_every_other_key_sets_the_option_of_its_name(read):
    lines = {
        "model": "tiny", "num_gpus": "2", "layers": "3", "lr": "1e-3", "clip": "0.5", "seed": "7",
        "steps": "5", "link": "200mbit,1ms", "eval_every": "2", "checkpoint": "folder",
        "resume": "yes", "trace": "None", "json": "true", "schedule": "gpipe", "chunks": "3",
        "recompute": "on", "precision": "bf16", "communication_pattern": "tree", "tensor": "2",
        "sequence_parallel": "True",
    }  # fmt: skip
    args = read("".join(f"{key}: {value}\n" for key, value in lines.items())).args
    assert args == HybridArgs(
        size="tiny", batch_size=8, layers=3, lr=1e-3, clip=0.5, seed=7, steps=5, link="200mbit,1ms",
        eval_every=2, checkpoint="folder", resume=True, trace=None, json=True,
        schedule="gpipe", chunks=3, recompute=True, precision="bf16", pattern="tree", data=1, tensor=2,
        sequence_parallel=True,
    )  # fmt: skip
    options = {field.name for field in dataclasses.fields(HybridArgs)}
    assert options - {"config"} <= KEYS.keys() == KEYS.keys() - {"config"}, "each other option is a key"


def test_the_command_line_comes_before_the_file_also_with_the_key_of_another_name(read):
    text = "num_gpus: 8\npipeline_parallelism: 2\nlr: 0.1\nrecompute: True\nmodel: tiny\n"
    config = read(
        text, "--pipeline", "4", "--num-gpus=4", "--lr", "0.5", "--no-recompute", "--json", "--size", "small"
    )
    assert (axes(config), config.num_processes) == ((4, 1, 1), 4)
    args = config.args
    assert (args.lr, args.recompute, args.json, args.size) == (0.5, False, True, "small")
    assert read(text, "--lr", "1", "--lr", "2").args.lr == 2, "the last one counts"


def test_the_model_is_a_gpt_of_a_size_or_an_mlp_of_its_width(read):
    assert model_of(read("num_gpus: 1\nmodel: tiny").args) == GPTConfig.named("tiny", num_layers=8)
    text = "num_gpus: 1\nmodel: mlp\nsize: 13m\nlayers: 2"
    assert model_of(read(text).args) == MLPConfig(2, 512)
    assert model_of(read(text, "--model", "tiny").args) == GPTConfig.named("tiny", num_layers=2)
    assert model_of(read("num_gpus: 1\nmodel: tiny", "--model", "mlp").args) == MLPConfig(8, 32)


def test_the_words_for_the_file_are_taken_out_of_a_command_line():
    assert split_config(["--a", "1", "--config", "f", "--b"]) == ("f", ["--a", "1", "--b"])
    assert split_config(["--config=f"]) == ("f", [])
    assert split_config(["--steps", "3"]) == (None, ["--steps", "3"])
    with pytest.raises(WorkbookError, match="--config has no value"):
        split_config(["--config", "--steps"])


def test_auto_asks_the_planner_for_what_is_not_given(read):
    asked: list[Any] = []

    def choose(args: HybridArgs, num_processes: int, given: dict[str, Any]) -> ParallelSizes:
        asked.append((args.batch_size, num_processes, dict(given)))
        return ParallelSizes(pipeline=2, data=2, tensor=2, zero=1, microbatches=4, recompute=True)

    text = (
        "num_gpus: 8\nbatch_size: 6\nsharding_strategy: auto\npipeline_parallelism: True\n"
        "zero_redundancy: 1\ntensor: 2\nrecompute: True\ndata:\n"
    )
    config = read(text, choose=choose)
    assert asked == [(48, 8, {"zero": 1, "tensor": 2, "recompute": True})]
    assert (axes(config), config.args.microbatches, config.args.batch_size) == ((2, 2, 2), 4, 48)
    open_axes = read(
        "num_gpus: 8\nsharding_strategy: auto\ndata: 2\nsequence_parallel: True\npipeline_parallelism: True"
    )
    assert open_axes.given == {"data": 2, "sequence_parallel": True}
    off = read("num_gpus: 8\nsharding_strategy: auto\npipeline_parallelism: False\nzero_redundancy: False")
    assert off.given == {"pipeline": 1, "zero": 0}


def test_a_choice_of_the_planner_that_makes_no_sense_is_refused(read):
    with pytest.raises(WorkbookError, match="the product of the axes"):
        read("num_gpus: 8\nsharding_strategy: auto", choose=lambda *_: ParallelSizes(data=4))


def test_the_training_reads_a_file_or_options_alone(read, monkeypatch):
    read("num_gpus: 4\nbatch_size: 6\ntensor: 2")
    words = ["--config", "c.yaml", "--steps", "7"]
    assert read_command_line(words, 4) == HybridArgs(batch_size=12, data=2, tensor=2, steps=7)
    with pytest.raises(WorkbookError, match="num_gpus is 4, but 2 processes"):
        read_command_line(words, 2)
    monkeypatch.setattr("sys.argv", ["train_hybrid.py", "--tensor", "2", "--batch-size", "6"])
    assert read_command_line(sys.argv[1:], 4) == HybridArgs(batch_size=6, tensor=2)
    monkeypatch.setattr("sys.argv", ["train_hybrid.py", *words, "--help"])
    with pytest.raises(Usage, match="--config"):
        read_command_line(sys.argv[1:], 4)


def test_another_number_of_processes_than_num_gpus_is_refused(read):
    config = read("num_gpus: 4")
    validate_world_size(config, 4)
    with pytest.raises(WorkbookError, match=r"^num_gpus is 4, but 2 processes have started; .*--num_gpus 2"):
        validate_world_size(config, 2)


RIGHT: dict[str, list[Any]] = {
    "num_gpus": [8, 4, 6, 12], "model": ["tiny", "24heads", "mlp"], "batch_size": [8, 24, 6, 1],
    "pipeline_parallelism": [True, False, 2, 3, 16], "zero_redundancy": [True, False, 1, 2, 3],
    "sharding_strategy": ["manual", "auto"], "communication_pattern": ["ring", "tree", "auto", "torch"],
    "data": [1, 2, 3, "None"], "tensor": [1, 2, 3, 4], "sequence_parallel": [True, False], "chunks": [1, 2],
    "schedule": ["1f1b", "naive", "interleaved", "zb_v"], "microbatches": [1, 2, 3, 8], "layers": [2, 8],
    "lr": [0.1, "1e-3"], "steps": [3],
}  # fmt: skip
WRONG = [0, -1, "many", ".nan", "[1]", "", "1.5"]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Draw some keys. Their values are mostly right alone, and often make no sense together."""
    keys = draw(st.lists(st.sampled_from(list(RIGHT)), unique=True, max_size=6))
    entries = {key: draw(st.sampled_from(RIGHT[key])) for key in ["num_gpus", *keys]}
    if draw(st.integers(0, 4)) == 4:
        entries[draw(st.sampled_from([*entries, "tensr"]))] = draw(st.sampled_from(WRONG))
    return entries


@settings(max_examples=100)
@given(entries=configurations())
def test_a_configuration_is_accepted_with_right_sizes_or_refused_with_a_key_and_its_line(
    entries, tmp_path_factory
):
    path = tmp_path_factory.getbasetemp() / "random.yaml"
    path.write_text("# first line\n" + "".join(f"{key}: {value}\n" for key, value in entries.items()))
    try:
        config = load(str(path))
    except WorkbookError as error:
        places = re.match(rf"{re.escape(str(path))}((?:, line \d+(?: \(\w+\))?)+): ", str(error))
        assert places, error
        for line, key in re.findall(r"line (\d+)(?: \((\w+)\))?", places[1]):
            named = list(entries)[int(line) - 2]
            assert key in (named, "") and named in str(error), error
        return
    assert config.num_processes == entries["num_gpus"]
    assert "tensr" not in entries
    if not config.auto:
        sizes = sizes_of(config.args, config.num_processes)
        assert sizes.world_size == config.num_processes
        refuse_sizes(sizes, model_of(config.args), config.args.batch_size, config.num_processes)
        assert config.args.batch_size == entries.get("batch_size", 8) * sizes.data


def test_the_command_prints_the_number_of_processes_alone(capsys):
    assert main(["--config", str(ROOT / "configs" / "config.yaml"), "--data", "1"]) == 0
    assert main(["--config", str(ROOT / "configs" / "zero3.yaml")]) == 0
    assert capsys.readouterr() == ("8\n4\n", "")


def test_the_command_says_what_is_wrong_on_stderr(capsys):
    assert main(["--steps", "3"]) == 2
    assert main(["--config", "no/such/file"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split()[-1] for line in said.err.splitlines()] == [
        "configs/config.yaml.",
        "(no/such/file)).",
    ]


def test_the_help_lists_every_key_with_its_values(capsys):
    assert main(["--help"]) == 0
    listed = re.findall(r"^  (\w+) +\S", capsys.readouterr().out, re.MULTILINE)
    assert listed == list(KEYS)
