"""The configuration of a hybrid training: what the keys mean, and the sentence for each kind of mistake."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_parallel.arguments import HybridArgs, model_of, sizes_of
from hybrid_parallel.config import Config, load, main
from hybrid_parallel.planner.auto import read_arguments
from hybrid_parallel.sizes import refuse_sizes
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import GPTConfig, MLPConfig
from tests.run_modes import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Load a configuration from its text, as the file c.yaml in the current folder."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> Config:
        Path("c.yaml").write_text(text)
        return load("c.yaml", overrides)

    return load_text


def axes(config: Config) -> tuple[int, ...]:
    return config.args.pipeline, config.args.data, config.args.tensor


def test_the_configurations_of_the_repository_are_what_their_names_say():
    sizes = {}
    for path in CONFIGS:
        config = load(str(path))
        args, number = config.args, config.num_processes
        sizes[path.stem] = number, args.pipeline, args.data, args.tensor, args.zero
        if config.given is None:
            refuse_sizes(sizes_of(args, number), model_of(args), args.batch_size, number, args.experts)
    assert sizes == {
        "auto": (4, True, None, None, True),  # the planner's choice
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
    words = ["--pipeline", "4", "--num-gpus=4", "--lr", "0.5", "--no-recompute", "--json", "--model", "small"]
    config = read(text, *words)
    assert (axes(config), config.num_processes) == ((4, 1, 1), 4)
    args = config.args
    assert (args.lr, args.recompute, args.json, args.size) == (0.5, False, True, "small")
    assert read(text, "--lr", "1", "--lr", "2").args.lr == 2, "the last one counts"


def test_this_configuration_is_accepted_key_for_key(read):
    config = read(
        'model: "transformer"\nbatch_size: 32\nnum_gpus: 4\npipeline_parallelism: True\n'
        'zero_redundancy: True\nsharding_strategy: "auto"\ncommunication_pattern: "ring"\ntransport: sockets'
    )
    assert config.num_processes == 4 and config.args.batch_size == 4 * 32
    assert (config.args.model, config.args.size) == ("gpt", "small")
    assert (config.args.pattern, config.args.transport) == ("ring", "sockets")


def test_the_model_is_a_gpt_of_a_size_or_an_mlp_of_its_width(read):
    assert model_of(read("num_gpus: 1\nmodel: tiny").args) == GPTConfig.named("tiny", num_layers=8)
    text = "num_gpus: 1\nmodel: mlp\nsize: 13m\nlayers: 2"
    assert model_of(read(text).args) == MLPConfig(2, 512)
    assert model_of(read(text, "--model", "13m").args) == GPTConfig.named("13m", num_layers=2)
    assert model_of(read("num_gpus: 1\nmodel: tiny", "--model", "mlp").args) == MLPConfig(8, 128)
    with pytest.raises(WorkbookError, match="model is tiny and size is 13m; leave one of the two out"):
        read(text, "--model", "tiny")


def test_auto_leaves_to_the_planner_what_is_not_given_as_a_number_or_false(read):
    text = (
        "num_gpus: 8\nbatch_size: 6\nsharding_strategy: auto\npipeline_parallelism: True\n"
        "zero_redundancy: 1\ntensor: 2\nrecompute: True\ndata:\n"
    )
    config = read(text)
    assert (config.given, config.args.batch_size) == ({"zero": 1, "tensor": 2, "recompute": True}, 48)
    off = "num_gpus: 8\nsharding_strategy: auto\npipeline_parallelism: False\nzero_redundancy: False"
    assert read(off, "--no-recompute").given == {"pipeline": 1, "zero": 0, "recompute": False}


def test_the_training_reads_a_file_or_options_alone(read):
    read("num_gpus: 4\nbatch_size: 6\ntensor: 2")
    two, four = (Cluster(0, ranks, 0, torch.device("cpu"), dist.HashStore()) for ranks in (2, 4))
    words = ["--config", "c.yaml", "--steps", "7"]
    expected = HybridArgs(batch_size=12, pipeline=1, data=2, tensor=2, microbatches=1, steps=7)
    assert read_arguments(words, four) == expected
    with pytest.raises(WorkbookError, match="num_gpus is 4, but 2 processes"):
        read_arguments(words, two)
    assert read_arguments(["--tensor", "2", "--batch-size", "6"], four) == HybridArgs(batch_size=6, tensor=2)


def test_the_command_says_what_is_wrong_on_stderr(capsys):
    with pytest.raises(SystemExit, match=r"^no/such/file: the file cannot be read \("):
        main(["--config", "no/such/file"])
    assert capsys.readouterr().out == ""


MISTAKES = {
    # Keys
    "num_gpus: 8\ntensr: 2": "There is no option --tensr: did you mean --tensor?",
    "num_gpus: 8\n\nnum_gpus: 8": "num_gpus is given twice; leave one of the two out.",
    "num_gpus: 8\npipeline: 2\npipeline_parallelism: 2": "pipeline is given twice; leave one of the two out.",
    "model: tiny\nsteps: 3": "num_gpus is None; give the number of processes, as in num_gpus: 4.",
    "num_gpus: 4\nmetronome: 20ms": "There is no option --metronome.",
    "num_gpus: 4\nconfig: d.yaml": "There is no option --config.",
    # Types
    "num_gpus: eight": "--num-gpus is 'eight'; it must be a whole number.",
    "num_gpus: 8\ndata: two": "--data is 'two'; it must be a whole number.",
    "num_gpus: 8\nsteps:": "--steps is 'None'; it must be a whole number.",
    "num_gpus: 8\nrecompute: 1": "recompute is '1'; it must be True or False.",
    "num_gpus: 8\nzero_redundancy: 4": (
        "--zero-redundancy is '4'; it must be one of True, False, 0, 1, 2, 3."
    ),
    "num_gpus: 8\npipeline: two": "--pipeline-parallelism is 'two'; it must be one of True, False, INT.",
    "num_gpus: 8\ndata: [2, 4]": "data is a list or a mapping; write one key and its value a line, ...",
    # Sizes
    "num_gpus: 0": "num_gpus is 0; give the number of processes, as in num_gpus: 4.",
    "num_gpus: 8\ndata: 0": "data is 0; it must be at least 1.",
    "num_gpus: 8\ntensor: 0\npipeline: True": "pipeline is 2, context is 1, tensor is 0; ...",
    "num_gpus: 3\npipeline_parallelism: True": "pipeline is 2, context is 1, tensor is 1; ...",
    "num_gpus: 8\nsteps: 4\ntensor: 3": (
        "pipeline is 1, context is 1, tensor is 3; their product must divide the number of ranks, 8."
    ),
    "num_gpus: 8\ndata: 2\npipeline: 2": "4 ranks = 2 (pipeline) x 2 (data) x 1 (tensor), but there are ...",
    "num_gpus: 2\ntensor: 2\npipeline_parallelism: True": "pipeline is 2, context is 1, tensor is 2; ...",
    "num_gpus: 4\ndata: 4\npipeline_parallelism: True": "8 ranks = 2 (pipeline) x 4 (data) x 1 (tensor), ...",
    "num_gpus: 4\nbatch_size: 400000": "--batch-size 1600000: there can be at most ...",
    "num_gpus: 4\nzero_redundancy: 3\npipeline: 2": "zero is 3 beside a pipeline, ...",
    # Options of the run
    "num_gpus: 4\nlr: 0": "--lr 0: a learning rate is a number above 0, such as 0.001.",
    "num_gpus: 4\nsharding_strategy: auto\nlr: 0": "--lr 0: a learning rate is a number above 0, ...",
    "num_gpus: 4\nsharding_strategy: auto\nmodel: mlp": "sharding_strategy auto knows no mlp, ...",
    "num_gpus: 4\nsharding_strategy: auto\nsync_every: 8": "sharding_strategy auto knows no mlp, ...",
    "num_gpus: 4\nlink: fast": "--link fast: 'fast' is not a rate; ...",
    # Files
    "": "the file has no keys; write one key and its value a line, such as num_gpus: 8.",
    "num_gpus: 8\n\ttensor: 2": "the file cannot be read (found character '\\t' that cannot ...",
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.items(), ids=lambda text: text[:50])
def test_a_mistake_is_answered_with_the_file_the_key_and_what_is_allowed(text: str, sentence: str, read):
    with pytest.raises(WorkbookError) as refused:
        read(text)
    file, said = str(refused.value).split(": ", 1)
    assert file == "c.yaml" and "\n" not in said
    assert said.startswith(sentence[:-3]) if sentence.endswith("...") else said == sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tensr", "2"], "There is no option --tensr: did you mean --tensor?"),
        (["--no-tensor"], "There is no option --no-tensor: did you mean --tensor?"),
        (["--lr", "-1"], "--lr -1: a learning rate is a number above 0, such as 0.001."),
    ],
)
def test_a_mistake_on_the_command_line_is_answered_with_its_option(words, sentence, read):
    with pytest.raises(WorkbookError, match=f"^c.yaml: {re.escape(sentence)}$"):
        read("num_gpus: 8\npipeline_parallelism: True\n", *words)


SCRIPT = ROOT / "scripts" / "launch_training.sh"


@pytest.fixture
def launch(tmp_path):
    """Run the script in an empty folder, with a torchrun that prints its arguments, one a line, and exits 7.

    The python that reads the configuration is a stub, too, unless `python` is given: it asks for 8 processes.
    """
    torchrun = tmp_path / "fake torchrun"
    torchrun.mkdir()
    (torchrun / "torchrun").write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$OMP_NUM_THREADS" "$@"\nexit 7\n'
    )
    (torchrun / "python3").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" >&2\necho 8\n')
    for file in torchrun.iterdir():
        file.chmod(0o755)
    copy = tmp_path / "a copy" / "scripts" / SCRIPT.name  # beside it there is no .venv
    copy.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, copy)

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{torchrun}:{os.environ['PATH']}", "TORCHRUN": "torchrun"} | env
        command = ["bash", str(copy), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    return run


def test_it_starts_torchrun_with_the_number_of_processes_and_ends_with_its_exit_code(launch):
    options = ["--max_restarts=2", "--config", "my config.yaml", "--steps", "5", "--link", "a *"]
    done = launch(*options, OMP_NUM_THREADS="3")
    train = str(Path(done.args[1]).parent.parent / "hybrid_parallel" / "train_hybrid.py")
    words = ["--config", "my config.yaml", "--steps", "5", "--link", "a *"]
    assert done.returncode == 7
    assert done.stdout.splitlines() == ["3", "--max-restarts=2", "--nproc-per-node=8", train, *words]
    assert done.stderr.splitlines() == ["-P", "-m", "hybrid_parallel.config", *words]


def test_each_machine_of_several_starts_its_part_and_meets_at_the_first(launch):
    machines = ["--nnodes", "2", "--node_rank=1", "--master-addr", "node0"]
    for port, words in (("29500", []), ("1234", ["--master-port", "1234"])):
        done = launch(*machines, "--config", "c.yaml", *words, "--tensor", "4")
        assert done.returncode == 7, done.stderr
        assert done.stdout.splitlines()[1:-5] == [
            "--max-restarts=0", "--nproc-per-node=4", "--nnodes=2", "--node-rank=1", "--rdzv-backend=static",
            f"--rdzv-endpoint=node0:{port}", "--rdzv-id=hybrid",
        ]  # fmt: skip
        assert done.stdout.splitlines()[-4:] == ["--config", "c.yaml", "--tensor", "4"]


MACHINES = {"--nnodes": "2", "--node-rank": "0", "--master-addr": "node0"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--nnodes": "0"}, "--nnodes is '0'; it must be the number of machines, 1 or more."),
        ({"--nnodes": "3"}, "num_gpus is 8, which 3 machines cannot share equally; choose a multiple of 3."),
        ({"--nnodes": None}, "--node-rank and --master-addr need --nnodes, the number of machines."),
        ({"--node-rank": "2"}, "--node-rank is '2'; it must be from 0 to 1."),
        ({"--node-rank": None}, "--nnodes needs --node-rank, this machine's number from 0 to 1."),
        ({"--master-port": "0"}, "--master-port is '0'; it must be from 1 to 65535."),
        ({"--config": None}, "There is no --config FILE."),
    ],
)
def test_machines_that_make_no_sense_are_refused_before_any_start(launch, changes: dict, said: str):
    options = {"--config": "c.yaml"} | MACHINES | changes
    done = launch(*(f"{name}={value}" for name, value in options.items() if value is not None))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == said


def test_a_mistake_in_the_configuration_is_refused_before_any_start(launch, tmp_path):
    python = tmp_path / "fake torchrun" / "python3"
    python.write_text("#!/usr/bin/env bash\necho 'c.yaml: there is no num_gpus' >&2\nexit 2\n")
    done = launch("--config", "c.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "c.yaml: there is no num_gpus\n")
