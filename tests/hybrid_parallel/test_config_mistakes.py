"""Each kind of mistake in a configuration is answered in one sentence with the key, the line and the cure."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_parallel.config import load
from lab.launch.errors import WorkbookError

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
    "num_gpus: 8\n? [a]\n: 3": "c.yaml, line 2: a key is a word, such as num_gpus, and not a list ...",
    # Types
    "num_gpus: eight": "c.yaml, line 1: num_gpus is 'eight'; it must be an integer.",
    "num_gpus: '8'": "c.yaml, line 1: num_gpus is '8'; it must be an integer.",
    "num_gpus: 8.0": "c.yaml, line 1: num_gpus is 8.0; it must be an integer.",
    "num_gpus: 010": "c.yaml, line 1: num_gpus is 010; it must be an integer.",
    "num_gpus: 1:30": "c.yaml, line 1: num_gpus is 1:30; it must be an integer.",
    "num_gpus: !!str 8": "c.yaml, line 1: num_gpus is '8'; it must be an integer.",
    "num_gpus: True": "c.yaml, line 1: num_gpus is True; it must be an integer.",
    "num_gpus: [8]": "c.yaml, line 1: num_gpus is a list; it must be an integer.",
    "num_gpus: 8\ntensor:": "c.yaml, line 2: tensor is empty; it must be an integer.",
    "num_gpus: 8\nlr: .inf": "c.yaml, line 2: lr is .inf; it must be a number.",
    "num_gpus: 8\ndata: two": "c.yaml, line 2: data is 'two'; it must be an integer or None.",
    "num_gpus: 8\nrecompute: 1": "c.yaml, line 2: recompute is 1; it must be True or False.",
    "num_gpus: 8\nmodel: gpt2": "c.yaml, line 2: model is 'gpt2'; it must be tiny, small, 24heads, ...",
    "num_gpus: 8\ncheckpoint: True": "c.yaml, line 2: checkpoint is True; it must be None or a line of text.",
    "num_gpus: 8\nlink: |\n  1gbit\n": r"c.yaml, line 2: link is '1gbit\n'; ...",
    "num_gpus: 8\nlink: ' '": "c.yaml, line 2: link is ' '; it must be None or a line of text.",
    "num_gpus: 8\nzero_redundancy: 4": (
        "c.yaml, line 2: zero_redundancy is 4; it must be True, False, 1, 2 or 3."
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
    "num_gpus: 6\nsharding_strategy: auto\ntensor: 3": (
        "c.yaml, line 3: tensor is 3; it must divide the model's 4 query heads."
    ),
    "num_gpus: 6\nsharding_strategy: auto\ntensor: 4": (
        "c.yaml, line 1 (num_gpus), line 3 (tensor): 6 processes cannot be ? (pipeline) x ? (data) x "
        "4 (tensor); ..."
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
    "": "c.yaml, line 1: the file is empty; write one key and its value a line, such as num_gpus: 8.",
    "# nothing\n\n": "c.yaml, line 2: the file is empty; ...",
    "# a\n- num_gpus: 8": "c.yaml, line 2: the file is a list; ...",
    "num_gpus 8": "c.yaml, line 1: the file is text without keys; ...",
    "num_gpus: 8\n\ttensor: 2": "c.yaml, line 2: 'tensor: 2' has a tab; YAML takes only spaces.",
    "num_gpus:\t8": r"c.yaml, line 1: 'num_gpus:\t8' has a tab; YAML takes only spaces.",
    "num_gpus: 8: 9": "c.yaml, line 1: 'num_gpus: 8: 9' is not YAML (mapping values are not allowed ...",
    "num_gpus: 8\n---\nsteps: 3": "c.yaml, line 2: '---' is not YAML (but found another document); ...",
    "num_gpus: 8\nsteps: " + "[" * 9999: "c.yaml, line 2: lists are in lists; no key ...",
    "num_gpus: 8\nsteps: 3\0": "c.yaml, line 2: there is a character that YAML does not allow.",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(text: str | bytes, *overrides: str) -> str:
    """Return what is said against the configuration."""
    Path("c.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(WorkbookError) as caught:
        load("c.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=lambda text: text[:50])
def test_a_mistake_is_answered_with_its_line_and_the_cure(text: str, sentence: str):
    said = refusal(text)
    assert "\n" not in said
    assert said.startswith(sentence[:-3]) if sentence.endswith("...") else said == sentence


def test_a_file_that_is_not_text_is_refused():
    assert refusal(b"num_gpus: 8\nmodel: \xff\n") == "c.yaml, line 2: the file is not text in UTF-8."
    assert refusal(b"# x\n" * (1 << 18) + b"#") == (
        "--config c.yaml: the file has more than a MiB, so it is no configuration."
    )


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(name: str):
    with pytest.raises(WorkbookError, match=f"^--config {re.escape(name)}: the file cannot be read"):
        load(name)


def test_a_byte_order_mark_and_other_line_ends_are_no_mistake():
    Path("c.yaml").write_bytes(b"\xef\xbb\xbfnum_gpus: 8\r\ntensor: 2\r\n")
    assert load("c.yaml").args.data == 4


@given(text=st.text("num_gps: 48\n\t-[]{}#&*!'\"|>%@`,?\u00e9\u2028\x07", max_size=40))
def test_a_text_of_any_kind_is_read_or_refused_in_a_line(text: str):
    for content in (text, "num_gpus: 4\n" + text, f"num_gpus: 4\nlink: {text}"):
        Path("c.yaml").write_text(content)
        try:
            load("c.yaml")
        except WorkbookError as error:
            assert re.match(r"c\.yaml, line \d+", str(error)) and "\n" not in str(error)


def test_a_file_can_run_no_code():
    Path("c.yaml").write_text("num_gpus: !!python/object/apply:os.mkdir ['made']\n")
    with pytest.raises(WorkbookError, match="num_gpus is a list"):
        load("c.yaml")
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensr", "2"], "--tensr: there is no key 'tensr'; did you mean tensor?"),
        (["--tensor", "two"], "--tensor: tensor is 'two'; it must be an integer."),
        (["--tensor"], "--tensor has no value; write --tensor VALUE."),
        (["--tensor", "--json"], "--tensor has no value; write --tensor VALUE."),
        (["--no-tensor"], "--no-tensor: there is no key 'no_tensor'; did you mean tensor?"),
        (["--tensor="], "--tensor: tensor is empty; it must be an integer."),
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
def test_a_mistake_on_the_command_line_is_answered_with_its_option(words: list[str], sentence: str):
    assert refusal("num_gpus: 8\npipeline_parallelism: True\n", *words) == sentence
