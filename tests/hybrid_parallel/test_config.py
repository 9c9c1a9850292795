"""The configuration of a hybrid training: what the keys mean, and the sentence for each kind of mistake."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm.script import Usage
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
        "auto": (None, None, None, 0),  # still open
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


def test_a_pipeline_has_about_four_microbatches_per_stage_unless_their_number_is_given(read):
    assert read("num_gpus: 4\nbatch_size: 24\npipeline: 2").args.microbatches == 8
    assert read("num_gpus: 4\nbatch_size: 7\npipeline: 2").args.microbatches == 7
    assert read("num_gpus: 4\nbatch_size: 24").args.microbatches == 1
    assert read("num_gpus: 4\nbatch_size: 24\npipeline: 2\nmicrobatches: 3").args.microbatches == 3


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
    monkeypatch.setattr("sys.argv", ["train_hybrid.py", *words, "--help"])
    with pytest.raises(Usage, match="--config"):
        read_command_line(sys.argv[1:], 4)


def test_the_command_says_what_is_wrong_on_stderr(capsys):
    assert main(["--steps", "3"]) == 2
    assert main(["--config", "no/such/file"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split()[-1] for line in said.err.splitlines()] == [
        "configs/config.yaml.",
        "(no/such/file)).",
    ]


MISTAKES = {
    # Keys
    "num_gpus: 8\ntensr: 2": "c.yaml, line 2: there is no key 'tensr'; did you mean tensor?",
    "num_gpus: 8\nNum-GPUs: 2": "c.yaml, line 2: there is no key 'Num-GPUs'; did you mean num_gpus?",
    "num_gpus: 8\nzzz: 2": "c.yaml, line 2: there is no key 'zzz'; the keys are model, batch_size, ...",
    "num_gpus: 8\n\nnum_gpus: 8": "c.yaml, line 3: num_gpus is given already in line 1; keep one of the two.",
    "num_gpus: 8\npipeline: 2\npipeline_parallelism: 2": (
        "c.yaml, line 3: pipeline_parallelism means the same as pipeline in line 2; keep one of the two."
    ),
    "model: tiny\nsteps: 3": "c.yaml, line 2: the file ends without num_gpus; add it, as in num_gpus: 4.",
    "num_gpus: 8\n? [a]\n: 3": "c.yaml, line 2: a key is a list or a mapping; ...",
    # Types
    "num_gpus: eight": "c.yaml, line 1: num_gpus is 'eight'; it must be an integer.",
    "num_gpus: 8.0": "c.yaml, line 1: num_gpus is '8.0'; it must be an integer.",
    "num_gpus: [8]": "c.yaml, line 1: num_gpus is a list or a mapping; ...",
    "num_gpus: 8\nsteps:": "c.yaml, line 2: steps is empty; it must be an integer.",
    "num_gpus: 8\nlr: .inf": "c.yaml, line 2: lr is '.inf'; it must be a number.",
    "num_gpus: 8\ndata: two": "c.yaml, line 2: data is 'two'; it must be an integer or None.",
    "num_gpus: 8\nrecompute: 1": "c.yaml, line 2: recompute is '1'; it must be True or False.",
    "num_gpus: 8\nmodel: gpt2": "c.yaml, line 2: model is 'gpt2'; it must be tiny, small, 24heads, ...",
    "num_gpus: 8\nlink: ' '": "c.yaml, line 2: link is ' '; it must be None or a line of text.",
    "num_gpus: 8\nzero_redundancy: 4": (
        "c.yaml, line 2: zero_redundancy is '4'; it must be True, False, 1, 2 or 3."
    ),
    "num_gpus: 8\npipeline_parallelism: maybe": (
        "c.yaml, line 2: pipeline_parallelism is 'maybe'; it must be True, False or an integer."
    ),
    # Sizes
    "num_gpus: 0": "c.yaml, line 1: num_gpus is 0; it must be from 1 to 1048576.",
    "num_gpus: 8\nbatch_size: 0": "c.yaml, line 2: batch_size is 0; it must be from 1 to 1048576.",
    "num_gpus: 8\ntensor: 0": "c.yaml, line 2: tensor is 0; it must be at least 1.",
    "num_gpus: 8\nsteps: 4\ntensor: 3": (
        "c.yaml, line 1 (num_gpus), line 3 (tensor): 8 processes cannot be 1 (pipeline) x ? (data) x "
        "3 (tensor); the product of the axes must be num_gpus."
    ),
    "data: 2\nnum_gpus: 8\npipeline_parallelism: 2": (
        "c.yaml, line 1 (data), line 2 (num_gpus), line 3 (pipeline_parallelism): 8 processes cannot be "
        "2 (pipeline) x 2 (data) x 1 (tensor); the product of the axes must be num_gpus."
    ),
    "num_gpus: 2\ntensor: 2\npipeline_parallelism: True": (
        "c.yaml, line 3 (pipeline_parallelism), line 1 (num_gpus), line 2 (tensor): pipeline_parallelism is "
        "True, but there is no process for a second stage; give it False, or a larger num_gpus."
    ),
    "num_gpus: 4\nbatch_size: 400000": (
        "c.yaml, line 2 (batch_size), line 1 (num_gpus): batch_size is 400000 per device, which makes "
        "1600000 examples in a step; there can be at most 1048576."
    ),
    "num_gpus: 4\nzero_redundancy: 3\npipeline_parallelism: True": (
        "c.yaml, line 2 (zero_redundancy), line 3 (pipeline_parallelism): zero is 3 beside a pipeline: ..."
    ),
    "num_gpus: 3\ntensor: 3": "c.yaml, line 2: tensor is 3; it must divide the model's 4 query heads.",
    "num_gpus: 3\nmodel: mlp\ntensor: 3\nlayers: 3": (
        "c.yaml, line 3: tensor is 3; it must divide the model's 128 outputs per layer."
    ),
    "num_gpus: 2\nmodel: mlp\nmodel: small": (
        "c.yaml, line 3: model is given already in line 2; keep one of the two."
    ),
    "num_gpus: 2\nmodel: mlp\ntensor: 2\nsequence_parallel: True": (
        "c.yaml, line 4: sequence_parallel divides tokens, and an MLP has none; leave it out."
    ),
    "num_gpus: 2\nmodel: mlp\nrecompute: True": (
        "c.yaml, line 3: recompute would save no memory: a layer of an MLP keeps only its input. ..."
    ),
    "num_gpus: 4\nmicrobatches: 3": "c.yaml, line 2: 32 examples in a step cannot be divided evenly ...",
    "num_gpus: 16\npipeline_parallelism: 16": (
        "c.yaml, line 2 (pipeline_parallelism): 16 stages need at least as many layers, and the model has 8."
    ),
    # Options of the run
    "num_gpus: 4\nlr: 0": "c.yaml, line 2: lr is 0: a learning rate is a number above 0, such as 0.001.",
    "num_gpus: 4\nclip: -1": "c.yaml, line 2: clip is -1: the largest norm is a number above 0.",
    "num_gpus: 4\nresume: True": "c.yaml, line 2: --resume needs to know from where: ...",
    "num_gpus: 4\nlink: fast": "c.yaml, line 2: link is fast: 'fast' is not a rate; ...",
    "num_gpus: 4\nmetronome: 20ms": (
        "c.yaml, line 2: metronome is 20ms: the hybrid training does not offer it; leave it out."
    ),
    "num_gpus: 4\ncheckpoint_every: -1": "c.yaml, line 2: checkpoint_every is -1: it is a number ...",
    "num_gpus: 4\ncheckpoint_keep: 0": "c.yaml, line 2: checkpoint_keep is 0: at least 1 checkpoint ...",
    "num_gpus: 4\nlayers: 5000": "c.yaml, line 2: layers is 5000: it must be from 1 to 4096.",
    # Files
    "": "c.yaml, line 1: the file has no keys; write one key and its value a line, such as num_gpus: 8.",
    "# a\n- num_gpus: 8": "c.yaml, line 2: the file has no keys; ...",
    "num_gpus 8": "c.yaml, line 1: the file has no keys; ...",
    "num_gpus: 8\n\ttensor: 2": "c.yaml, line 2: this is not YAML (found character '\\t' that cannot ...",
    "num_gpus: 8: 9": "c.yaml, line 1: this is not YAML (mapping values are not allowed here); ...",
    "num_gpus: 8\n---\nsteps: 3": "c.yaml, line 2: this is not YAML (but found another document); ...",
}  # fmt: skip


def refusal(text: str, *overrides: str) -> str:
    """Return what is said against the configuration."""
    Path("c.yaml").write_text(text)
    with pytest.raises(WorkbookError) as caught:
        load("c.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=lambda text: text[:50])
def test_a_mistake_is_answered_with_its_line_and_the_cure(text: str, sentence: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal(text)
    assert "\n" not in said
    assert said.startswith(sentence[:-3]) if sentence.endswith("...") else said == sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensr", "2"], "--tensr: there is no key 'tensr'; did you mean tensor?"),
        (["--tensor", "two"], "--tensor: tensor is 'two'; it must be an integer or None."),
        (["--tensor"], "--tensor has no value; write --tensor VALUE."),
        (["--tensor", "--json"], "--tensor has no value; write --tensor VALUE."),
        (["--no-tensor"], "--no-tensor: there is no key 'no_tensor'; did you mean tensor?"),
        (["--steps="], "--steps: steps is empty; it must be an integer."),
        (["tensor=2"], "The command line has 'tensor=2' where --key value should stand."),
        (["--json", "maybe"], "--json: json is 'maybe'; it must be True or False."),
        (["--lr", "-1"], "--lr: lr is -1: a learning rate is a number above 0, such as 0.001."),
        (
            ["--tensor=3"],
            "c.yaml, line 1 (num_gpus), line 2 (pipeline_parallelism), --tensor: 8 processes cannot be "
            "2 (pipeline) x ? (data) x 3 (tensor); the product of the axes must be num_gpus.",
        ),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_answered_with_its_option(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("num_gpus: 8\npipeline_parallelism: True\n", *words) == sentence


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(name: str):
    with pytest.raises(WorkbookError, match=f"^--config {re.escape(name)}: the file cannot be read"):
        load(name)


@given(text=st.text("num_gps: 48\n\t-[]{}#&*!'\"|>%@`,?\u00e9\u2028\x07", max_size=40))
def test_a_text_of_any_kind_is_read_or_refused_in_a_line(text: str, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "any_text.yaml"
    for content in (text, "num_gpus: 4\n" + text, f"num_gpus: 4\nlink: {text}"):
        file.write_text(content)
        try:
            load(str(file))
        except WorkbookError as error:
            assert str(error).startswith(f"{file}, line ") and "\n" not in str(error)
