"""The configuration of a hybrid training: what the keys mean, and the sentence for each kind of mistake."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_parallel.arguments import HybridArgs, model_of, sizes_of
from hybrid_parallel.config import Config, load, main, read_command_line
from hybrid_parallel.sizes import ParallelSizes, refuse_sizes
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig
from tests.run_modes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Load a configuration from its text, as the file c.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str, **options: Any) -> Config:
        Path("c.yaml").write_text(text)
        return load("c.yaml", overrides, **options)

    return load_text


def axes(config: Config) -> tuple[int, ...]:
    return config.args.pipeline, config.args.data, config.args.tensor


def test_the_configurations_of_the_repository_are_what_their_names_say():
    sizes = {}
    for path in CONFIGS:
        config = load(str(path))
        args, number = config.args, config.num_processes
        sizes[path.stem] = number, args.pipeline, args.data, args.tensor, args.zero
        if args.data is not None:
            refuse_sizes(sizes_of(args, number), model_of(args), args.batch_size, number, args.experts)
    assert sizes == {
        "auto": (4, None, None, None, 0),  # still open
        "config": (8, 2, 2, 2, 1),
        "context_and_experts": (8, 2, 2, 1, 0),  # and 2 along context
        "data_parallel": (4, 1, 4, 1, 0),
        "pipeline_and_data": (4, 2, 2, 1, 1),
        "three_axes": (8, 2, 2, 2, 1),
        "zero3": (4, 1, 4, 1, 3),
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
        ("num_gpus: 8\npipeline_parallelism: 4\ndata: None", (4, 2, 1)),
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


def test_a_pipeline_has_about_four_microbatches_per_stage_unless_their_number_is_given(read):
    assert read("num_gpus: 4\nbatch_size: 24\npipeline: 2").args.microbatches == 8
    assert read("num_gpus: 4\nbatch_size: 7\npipeline: 2").args.microbatches == 7
    assert read("num_gpus: 4\nbatch_size: 24").args.microbatches == 1
    assert read("num_gpus: 4\nbatch_size: 24\npipeline: 2\nmicrobatches: 3").args.microbatches == 3


def test_the_command_line_comes_before_the_file_also_with_the_key_of_another_name(read):
    text = "num_gpus: 8\npipeline_parallelism: 2\nlr: 0.1\nrecompute: True\nmodel: tiny\n"
    words = ["--pipeline", "4", "--num-gpus=4", "--lr", "0.5", "--no-recompute", "--json", "--size", "small"]
    config = read(text, *words)
    assert (axes(config), config.num_processes) == ((4, 1, 1), 4)
    args = config.args
    assert (args.lr, args.recompute, args.json, args.size) == (0.5, False, True, "small")
    assert read(text, "--lr", "1", "--lr", "2").args.lr == 2, "the last one counts"


def test_this_configuration_is_accepted_key_for_key(read):
    config = read(
        'model: "transformer"\nbatch_size: 32\nnum_gpus: 4\npipeline_parallelism: True\n'
        'zero_redundancy: True\nsharding_strategy: "auto"\ncommunication_pattern: "ring"'
    )
    assert config.num_processes == 4 and config.args.batch_size == 4 * 32
    assert (config.args.model, config.args.size, config.args.pattern) == ("gpt", "small", "ring")


def test_the_model_is_a_gpt_of_a_size_or_an_mlp_of_its_width(read):
    assert model_of(read("num_gpus: 1\nmodel: tiny").args) == GPTConfig.named("tiny", num_layers=8)
    text = "num_gpus: 1\nmodel: mlp\nsize: 13m\nlayers: 2"
    assert model_of(read(text).args) == MLPConfig(2, 512)
    assert model_of(read(text, "--model", "tiny").args) == GPTConfig.named("tiny", num_layers=2)
    assert model_of(read("num_gpus: 1\nmodel: tiny", "--model", "mlp").args) == MLPConfig(8, 32)


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
    off = "num_gpus: 8\nsharding_strategy: auto\npipeline_parallelism: False\nzero_redundancy: False"
    read(off, choose=choose)
    assert asked[1][2] == {"pipeline": 1, "zero": 0}


def test_the_training_reads_a_file_or_options_alone(read, monkeypatch):
    read("num_gpus: 4\nbatch_size: 6\ntensor: 2")
    words = ["--config", "c.yaml", "--steps", "7"]
    assert read_command_line(words, 4) == HybridArgs(
        batch_size=12, pipeline=1, data=2, tensor=2, microbatches=1, steps=7
    )
    with pytest.raises(WorkbookError, match="num_gpus is 4, but 2 processes"):
        read_command_line(words, 2)
    monkeypatch.setattr("sys.argv", ["train_hybrid.py", "--tensor", "2", "--batch-size", "6"])
    assert read_command_line(sys.argv[1:], 4) == HybridArgs(batch_size=6, tensor=2)


def test_the_command_says_what_is_wrong_on_stderr(capsys):
    assert main(["--steps", "3"]) == 2
    assert main(["--config", "no/such/file"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first == "There is no --config FILE, such as --config configs/config.yaml."
    assert second.startswith("--config no/such/file: the file cannot be read (")


MISTAKES = {
    # Keys
    "num_gpus: 8\ntensr: 2": "c.yaml, line 2: there is no key 'tensr'; did you mean tensor?",
    "num_gpus: 8\n\nnum_gpus: 8": (
        "c.yaml, line 3: num_gpus is given already, by num_gpus in line 1; keep one of the two."
    ),
    "num_gpus: 8\npipeline: 2\npipeline_parallelism: 2": (
        "c.yaml, line 3: pipeline is given already, by pipeline in line 2; keep one of the two."
    ),
    "model: tiny\nsteps: 3": "c.yaml: there is no num_gpus; add it, as in num_gpus: 4.",
    # Types
    "num_gpus: eight": "c.yaml, line 1: num_gpus is 'eight'; it must be an integer.",
    "num_gpus: 8\ndata: two": "c.yaml, line 2: data is 'two'; it must be an integer or None.",
    "num_gpus: 8\nrecompute: 1": "c.yaml, line 2: recompute is '1'; it must be True or False.",
    "num_gpus: 8\nzero_redundancy: 4": (
        "c.yaml, line 2: zero_redundancy is '4'; it must be True, False, 1, 2 or 3."
    ),
    # Sizes
    "num_gpus: 8\ntensor: 0": "c.yaml, line 2: tensor is 0; it must be at least 1.",
    "num_gpus: 8\nsteps: 4\ntensor: 3": (
        "c.yaml, line 3: pipeline is 1, context is 1, tensor is 3; their product must divide the number ..."
    ),
    "num_gpus: 8\ndata: 2\npipeline: 2": (
        "c.yaml, line 2 (data), line 3 (pipeline): 4 ranks = 2 (pipeline) x 2 (data) x 1 (tensor), but ..."
    ),
    "num_gpus: 2\ntensor: 2\npipeline_parallelism: True": (
        "c.yaml, line 1 (num_gpus), line 3 (pipeline_parallelism): pipeline_parallelism is True, but ..."
    ),
    "num_gpus: 4\nbatch_size: 400000": "c.yaml, line 2: --batch-size 1600000: there can be at most ...",
    "num_gpus: 4\nzero_redundancy: 3\npipeline: 2": (
        "c.yaml, line 2 (zero_redundancy), line 3 (pipeline): zero is 3 beside a pipeline, ..."
    ),
    "num_gpus: 3\ntensor: 3": "c.yaml, line 2: tensor is 3; it must divide the model's 4 query heads.",
    "num_gpus: 4\nmicrobatches: 3": "c.yaml, line 2: 32 examples in a step cannot be divided evenly ...",
    "num_gpus: 16\npipeline: 16": "c.yaml: 16 stages need at least as many layers, and the model has 8.",
    # Options of the run
    "num_gpus: 4\nlr: 0": "c.yaml, line 2: --lr 0: a learning rate is a number above 0, such as 0.001.",
    "num_gpus: 4\nlink: fast": "c.yaml, line 2: --link fast: 'fast' is not a rate; ...",
    "num_gpus: 4\nmetronome: 20ms": "c.yaml, line 2: there is no key 'metronome'; ...",
    # Files
    "": "c.yaml: the file has no keys; write one key and its value a line, such as num_gpus: 8.",
    "num_gpus: 8\n\ttensor: 2": "c.yaml, line 2: this is not YAML (found character '\\t' that cannot ...",
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=lambda text: text[:50])
def test_a_mistake_is_answered_with_its_line_and_the_cure(text: str, sentence: str, read):
    with pytest.raises(WorkbookError) as refused:
        read(text)
    said = str(refused.value)
    assert "\n" not in said
    assert said.startswith(sentence[:-3]) if sentence.endswith("...") else said == sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensr", "2"], "--tensr: there is no key 'tensr'; did you mean tensor?"),
        (["--tensor", "two"], "--tensor: tensor is 'two'; it must be an integer or None."),
        (["--tensor", "--json"], "--tensor has no value; write --tensor VALUE."),
        (["--no-tensor"], "--no-tensor: there is no key 'no_tensor'; did you mean tensor?"),
        (["--steps="], "--steps: steps is empty; it must be an integer."),
        (["tensor=2"], "The command line has 'tensor=2' where --key value should stand."),
        (["--json", "maybe"], "--json: json is 'maybe'; it must be True or False."),
        (["--lr", "-1"], "--lr: --lr -1: a learning rate is a number above 0, such as 0.001."),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_with_its_option(words, sentence, read):
    with pytest.raises(WorkbookError, match=f"^{re.escape(sentence)}$"):
        read("num_gpus: 8\npipeline_parallelism: True\n", *words)
