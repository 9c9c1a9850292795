# ---
# jupyter:
#   jupytext:
#     formats: ipynb,source//py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 Everything on one mesh
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/09_everything_on_one_mesh.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** A large model is trained with pipeline, data and tensor parallelism at the same time. Each rank then belongs
# to three groups. Which ranks form which group, which of the three may use a slow link, and who decides how many ranks each
# of them gets? At the end, two more kinds of parallelism join these: those of notebooks 11 and 12.
#
# You need about 40 minutes. The lesson beside this notebook is [hybrid_parallel](../hybrid_parallel/README.md). It adds no
# technique: it puts the classes of notebooks 05 to 08 together. You need to know the techniques of those notebooks, and
# `%%ranks` and `predict` from [notebook 02](02_collectives.ipynb): a cell that begins with `%%ranks` runs on all ranks, and
# `predict` asks for your guess before the run.

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

# %load_ext lab.notebook
# %ranks 8

# %%
from lab.notebook.prediction import predict

# %% [markdown]
# ## Eight ranks, three groups
#
# Take two stages, two replicas of each stage, and each layer divided between two ranks: 2 · 2 · 2 = 8 ranks. Think of them
# as a grid with three *axes*: pipeline, data and tensor. A rank has a place along each axis, its *coordinate*. Ranks that
# differ in one coordinate only form a group, and communicate along this axis.
#
# Ranks are numbered like the digits of a number. The last digit is the place along the tensor axis, so it changes from each
# rank to the next. The digit before it is the place along the data axis, and the first digit is the stage. With two ranks
# along each axis these are binary digits: rank 5 is 101, so it has stage 1, data 0 and tensor 1. **Predict**: rank 5
# averages its gradients with the other replica of its stage. Which rank is that?

# %%
partner = predict("With which rank does rank 5 average its gradients?", example=4)

# %%
# %%ranks
from hybrid_parallel.mesh import Mesh
from hybrid_parallel.sizes import ParallelSizes

AXES = ("pipeline", "data", "tensor")
sizes = ParallelSizes(pipeline=2, data=2, tensor=2, microbatches=4, pattern="ring")
mesh = Mesh(cluster, sizes)
groups = {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES}
groups

# %%
[other] = [rank for rank in pull("groups")[5]["data"] if rank != 5]
partner.compare(other)

# %% [markdown]
# Rank 5 is 101, and the other replica is 111, which is 7. Every training run on a mesh prints this picture of its ranks:

# %%
from hybrid_parallel.mesh import drawn
from hybrid_parallel.sizes import ParallelSizes

print(drawn(ParallelSizes(pipeline=2, data=2, tensor=2)))

# %% [markdown]
# Read it in three directions. Neighbours in a row of one stage, such as 0 and 1, are a tensor group: they divide each layer of
# the stage. Ranks below each other, such as 0 and 2, are a data group: they have equal weights, and average their gradients.
# Ranks at the same place of both blocks, such as 0 and 4, are a pipeline group: the first stage sends its activations to the
# second one. There are four groups of each kind, and each rank belongs to one of each kind.
# [hybrid_parallel/mesh.py](../hybrid_parallel/mesh.py) forms them.
#
# ## Who sends how much
#
# **A common belief**: "the data axis sends the most, because it sends all gradients of the model". Let us count. The model is a
# small GPT of four layers and 0.8 million parameters, so a rank has about a quarter of them: half of the layers, and half of
# each layer. A step has 16 examples of 64 tokens. **Predict**: how many times as many bytes does a rank send along the tensor
# axis as along the data axis? Below 1 means fewer.

# %%
more = predict("Along the tensor axis a rank sends how many times as many bytes?", example=0.5, unit="times")

# %%
# %%ranks
from hybrid_parallel.hybrid import HybridParallel
from lab.trace.ledger import LEDGER
from lab.models.model import GPT, GPTConfig
from lab.models.text import global_batch, load_corpus

config, corpus = GPTConfig.named("small"), load_corpus()


def batch_of(mesh, config, examples):
    """Return the examples of this rank's replica, and their targets."""
    x, y = global_batch(corpus, seed=0, step=0, batch_size=examples, block_size=config.block_size)
    replica = mesh.coordinate("data")
    return x.chunk(mesh.sizes.data)[replica], y.chunk(mesh.sizes.data)[replica]


def sent_in_a_step(examples):
    """Train one step, and return the bytes that this rank has sent along each axis."""
    x, y = batch_of(mesh, config, examples)
    hybrid = HybridParallel(GPT(config), mesh, example=x[: len(x) // sizes.microbatches])
    LEDGER.clear()
    hybrid.backward(x, y)
    rows = LEDGER.rows().items()
    return {axis: sum(row.bytes_sent for entry, row in rows if entry.axis == axis) for axis in AXES}


sent = sent_in_a_step(16)
sent

# %%
sent = pull("sent")[0]
more.compare(sent["tensor"] / sent["data"])

# %% [markdown]
# The tensor axis sends the most, even in this small model. It sends *activations*: in each layer four all-reduces of
# tokens · width numbers, two of activations in the forward and two of their gradients in the backward. The data axis sends
# *gradients*: as many numbers as the rank has parameters, once in a step. The pipeline axis sends, over each boundary between
# stages, one activation for each microbatch and its gradient back. It also sends the gradient of the embedding that the first
# and the last stage share. [hybrid_parallel/traffic.py](../hybrid_parallel/traffic.py) has these formulas, and the report of a
# training run shows them beside the counted bytes. Count again for other numbers of examples:

# %%
# %%ranks
EXAMPLES = [8, 16, 32, 64]
curves = [sent_in_a_step(examples) for examples in EXAMPLES]

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

examples, curves = pull("EXAMPLES")[0], pull("curves")[0]
figure, axes = plt.subplots(figsize=(6, 3.2))
for axis, color in {"tensor": "communication", "data": "backward", "pipeline": "forward"}.items():
    axes.plot(examples, [curve[axis] / 1e6 for curve in curves], "o-", color=COLORS[color], label=axis)
axes.set(xlabel="examples in a step", ylabel="MB that rank 0 sends", xticks=examples, xlim=(0, 68), ylim=(0, None))
axes.legend(frameon=False, title="axis")
show(
    figure,
    alt="Bytes that rank 0 sends in a step by axis. The tensor axis grows with the number of examples and is far above "
    "the others. The data axis is level. The pipeline axis grows slowly, and passes the data axis at 64 examples.",
)

# %% [markdown]
# The data axis is level: the number of gradients does not depend on the number of examples. The other two axes send
# activations, which grow with the number of examples: the tensor axis sends them four times in each layer, the pipeline axis
# only at the boundaries between stages. So the belief is right for few tokens, and wrong for the batches with which large
# models are trained.
#
# ## Which axis may use the slow link?
#
# The number of bytes is not everything. The ranks of a tensor group wait for each all-reduce, because the next layer needs its
# result. The mean over replicas can hide behind the backward (notebook 05). While a pipeline's activation travels, the rank
# that sent it computes the next microbatch (notebook 08).
#
# Imagine two machines with a slow cable between them, 100 Mbit/s. We take only two ranks, one in each machine, and one axis at
# a time, with the same model and the same 16 examples. **Predict**: with tensor parallelism, how many times as long does a step
# take over the slow cable as without it?

# %%
longer = predict("With tensor parallelism a step takes how many times as long?", example=1.5, unit="times as long")

# %%
import time

from comm.wire import slow_link
from hybrid_parallel.hybrid import HybridParallel
from hybrid_parallel.mesh import Mesh
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks
from lab.models.text import global_batch, load_corpus

CABLE = slow_link.parse("100mbit")


def seconds_of_a_step(cluster, axis):
    """Return the seconds of a step of two ranks along one axis: without the slow cable, and over it."""
    config, mesh = GPTConfig.named("small"), Mesh(cluster, ParallelSizes(**{axis: 2}, microbatches=4))
    x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=16, block_size=config.block_size)
    x, y = (part.chunk(mesh.sizes.data)[mesh.coordinate("data")] for part in (x, y))
    hybrid = HybridParallel(GPT(config), mesh, example=x[: len(x) // 4])
    fastest = []
    for link in (None, CABLE):
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            with slow_link.slowed(link):
                hybrid.optimizer.zero_grad()
                hybrid.backward(x, y)
                hybrid.optimizer.step()
            seconds.append(time.perf_counter() - start)
        fastest.append(min(seconds))
    return fastest


AXES = ("tensor", "data", "pipeline")
steps = {axis: max(run_ranks(seconds_of_a_step, 2, axis), key=lambda pair: pair[1]) for axis in AXES}
for axis, (here, over_the_cable) in steps.items():
    print(f"{axis:<10} without the cable {here * 1e3:6.1f} ms      over it {over_the_cable * 1e3:6.1f} ms")

# %%
figure, axes = plt.subplots(figsize=(6, 2.6))
for place, (label, color) in enumerate({"without the slow cable": "forward", "over it": "communication"}.items()):
    heights = [y + 0.38 * place - 0.19 for y in range(3)]
    axes.barh(heights, [pair[place] for pair in steps.values()], 0.36, color=COLORS[color], label=label)
axes.set(xlabel="seconds of a step, two ranks", yticks=range(3), yticklabels=AXES)
axes.invert_yaxis()
axes.legend(frameon=False)
show(
    figure,
    alt="Seconds of a step on two ranks for each axis, without and over a slow cable. Tensor parallelism becomes several "
    "times slower, data parallelism clearly slower, and the pipeline only a little.",
)
here, over_the_cable = steps["tensor"]
longer.compare(over_the_cable / here)

# %% [markdown]
# Now the order of the axes has a reason. A launcher such as `torchrun` numbers the ranks of one machine one after the other:
# with eight GPUs in a machine, ranks 0 to 7 are in the first. The tensor axis is the *last* one, so the ranks of a tensor
# group are neighbours, and are all in one machine if the group's size divides eight. The pipeline axis is the *first* one, so
# its ranks are far apart, in different machines. The data axis is between the two. This is also the order of Megatron-LM.
# The training of Llama 3 has another one: data, pipeline, tensor. Its data axis is FSDP, which gathers parameters before they
# are needed, so it can hide messages over a slow link, too.
#
# ## Each number counts once
#
# After the backward, a rank has gradients that are not complete. Along each axis, the class of that axis's lesson completes
# them. The pipeline adds up the two gradients of the tied embedding, which is in the first stage and in the last one. The data
# axis takes the mean over replicas. With sequence parallelism, each rank of a tensor group has the gradients of LayerNorm
# weights from its own tokens only, and the tensor axis adds them up. All three are sums: a mean is a sum that is divided by the
# number of replicas. [hybrid_parallel/hybrid.py](../hybrid_parallel/hybrid.py) computes them one after the other.
#
# Clipping is not so simple. It needs the norm of *all* gradients of the model: the root of the sum of all squares. No rank has
# all gradients, so the ranks must combine theirs. **A common belief**: "the norm is the root of the squares of all ranks".
# That is, each rank adds up the squares of its gradients, an all-reduce over all eight ranks adds up these sums, and the norm
# is the root of the result. **Predict**: how many times too large is this norm? 1 means that it is right.

# %%
too_large = predict("How many times too large is the norm?", example=1, unit="times")

# %%
# %%ranks
from lab.models.model import loss_of

tiny = GPTConfig.named("tiny")
x, y = batch_of(mesh, tiny, examples=16)
hybrid = HybridParallel(GPT(tiny).double(), mesh, x[: len(x) // 4], torch.optim.SGD, lr=0.1)
hybrid.backward(x, y)
squares = sum(p.grad.as_subclass(torch.Tensor).square().sum() for p in hybrid.module.parameters())
dist.all_reduce(squares)
norm_of_all_ranks = squares.sqrt()

alone = GPT(tiny).double()
full_x, full_y = global_batch(corpus, seed=0, step=0, batch_size=16, block_size=tiny.block_size)
loss_of(alone(full_x), full_y).backward()
norm_of_one_process = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.5)
norm_of_all_ranks, norm_of_one_process

# %%
too_large.compare((pull("norm_of_all_ranks")[0] / pull("norm_of_one_process")[0]).item())

# %% [markdown]
# The norm is almost twice as large, so gradients are clipped too much, and with more replicas even more. There is no error, and
# the loss still falls. Two replicas hold the same gradients, which alone makes the norm √2 = 1.414 times too large. The rest
# comes from other copies: above all the tied embedding, which is on two stages and has the largest gradient, and also the
# LayerNorms, the position embedding and some biases, which are on both ranks of a tensor group. What is *divided* must be added
# up, and what is *copied* must count once:
#
# | axis | its ranks have | what counts |
# |---|---|---|
# | pipeline | different stages; the tied embedding twice | all stages, without the second copy |
# | tensor | parts of a layer; LayerNorms and others in full | all parts; what is in full on the first rank only |
# | data | the same gradients; with ZeRO different shards | one replica; with ZeRO all shards |
#
# [hybrid_parallel/clipping.py](../hybrid_parallel/clipping.py) does that. Now check it: the norm, and all weights after a step,
# must equal those of one process.

# %%
# %%ranks
norm = hybrid.clip_grad_norm_(0.5)
hybrid.optimizer.step()
torch.optim.SGD(alone.parameters(), lr=0.1).step()
ours, theirs = hybrid.full_state_dict(), alone.state_dict()
errors = [float((ours[name] - theirs[name]).abs().max()) for name in theirs]
{
    "the norm is right": bool((norm - norm_of_one_process).abs() < 1e-12),
    f"all {len(errors)} tensors are equal": max(errors) < 1e-12,
}

# %% [markdown]
# ## The same from a file
#
# A training run has many options, so a file says what is trained and how the ranks are divided. Here is
# [configs/config.yaml](../configs/config.yaml) without its comments:

# %%
from pathlib import Path

import hybrid_parallel.config
from lab.notebook import REPOSITORY

path = REPOSITORY / "configs" / "config.yaml"
print("\n".join(line for line in path.read_text().splitlines() if line and not line.startswith("#")))

# %% [markdown]
# | key | what it means |
# |---|---|
# | `model` | what is trained, by its name in [lab/models/model.py](../lab/models/model.py) |
# | `batch_size` | examples *per device*; the ranks of a pipeline and of a tensor group work on the same ones |
# | `num_gpus` | number of processes, whether they have GPUs or not |
# | `pipeline_parallelism` | `False`, a number of stages, or `True`: as few stages as possible, but at least two |
# | `zero_redundancy` | `False`, the stage of ZeRO along the data axis, or `True`: stage 1 beside a pipeline, else 2 |
# | `sharding_strategy` | `manual`: as written; `auto`: a planner chooses all sizes that are not given as a number or `False` |
# | `communication_pattern` | who sends what to whom in a collective: `ring`, `tree`, or `torch` for PyTorch's own |
#
# The other keys are options of the training script, such as `tensor: 2`, the number of ranks along the tensor axis.
# The data axis has the ranks that the pipeline and the tensor axis leave.
#
# **A common belief**: "a step has batch_size times number of GPUs examples". **Predict**: how many examples does a step of this
# file have?

# %%
examples = predict("How many examples does a step have?", example=64, unit="examples")

# %%
from hybrid_parallel.arguments import sizes_of

config = hybrid_parallel.config.load(str(path))
sizes = sizes_of(config.args, config.num_processes)
print(drawn(sizes))
examples.compare(config.args.batch_size)

# %% [markdown]
# Only the two replicas work on different examples: 8 · 2 = 16. The four ranks of a replica work together on the same eight.
# A learning rate that was chosen for a batch of 64 would be wrong here: this batch is a quarter of that.
#
# A mistake in the file is reported before any process starts, with its key. Here are four; try your own:

# %%
import tempfile

from lab.launch.errors import WorkbookError

MISTAKES = ("pipline_parallelism: 2", "tensor: two", "tensor: 3", "zero_redundancy: 4")
for mistake in MISTAKES:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mine.yaml")
        file.write_text(f"model: small\nbatch_size: 8\nnum_gpus: 8\n{mistake}\n")
        try:
            hybrid_parallel.config.load(str(file))
        except WorkbookError as error:
            print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# ## Who chooses the sizes?
#
# `sharding_strategy: auto` asks the planner. It tries every plan on paper, that is, by formulas and without running it: each
# division of the ranks, with each schedule, stage of ZeRO, number of microbatches and so on. For each plan it predicts the
# memory of the fullest rank ([memory.py](../hybrid_parallel/planner/memory.py)) and the seconds of a step
# ([step_time.py](../hybrid_parallel/planner/step_time.py)), with the formulas of notebooks 03 and 06 to 08. The fastest plan that
# fits is the choice. With `auto`, a step has `batch_size` examples for each process, whatever the division, so that all plans
# train the same batch.
#
# On paper it can plan for machines that you do not have. Here it plans for Llama 3 8B on one machine with eight H100 of 80 GB,
# with 64 examples of 8192 tokens in a step:

# %%
from rich.console import Console

from hybrid_parallel.planner.machine import MACHINES
from hybrid_parallel.planner.search import best_by_division, plans
from hybrid_parallel.planner.shapes import SHAPES
from hybrid_parallel.planner.step_time import TimeModel
from hybrid_parallel.planner.table import table_of

llama, h100 = SHAPES["llama-3-8b"], MACHINES["h100"]


def show_plans(found, machine, rows=7):
    """Print the best plan of each division, and how many plans fit."""
    table = table_of(best_by_division(found)[:rows], TimeModel(llama, machine, batch=64))
    fit = sum(plan.seconds is not None for plan in found)
    Console(width=165, color_system=None).print(f"{len(found)} plans, of which {fit} fit", table, sep="\n")


one_machine = plans(llama, h100, devices=8, batch=64)
show_plans(one_machine, h100)

# %% [markdown]
# Eight replicas with ZeRO 3 win: NVLink is fast, so almost all of their messages hide behind computing. The last column says
# why each other division lost. Tensor parallelism waits in every layer. In a pipeline, the rank with the head also computes
# 128,256 logits for each token, and the other ranks wait for it.
#
# **A common belief**: "ZeRO 3 fits everything, so I need nothing else". Now put the eight H100 into eight machines, one in
# each, with a network of 10 Gbit/s between them, as in many offices. **Predict**: how many pipeline stages does the best plan
# have?

# %%
stages = predict("How many pipeline stages does the best plan have?", example=1)

# %%
from dataclasses import replace

from comm.cost import Link

office = replace(h100, devices_per_node=1, outer=Link(alpha=10e-6, beta=8 / 10e9))
eight_machines = plans(llama, office, devices=8, batch=64)
show_plans(eight_machines, office)

# %%
stages.compare(eight_machines[0].sizes.pipeline)

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
for panel, title, found in zip(
    panels, ("one machine, NVLink", "eight machines, 10 Gbit/s"), (one_machine, eight_machines), strict=True
):
    for stages_of_plan, color in {1: "communication", 2: "backward", 4: "forward", 8: "idle"}.items():
        fit = [p for p in found if p.seconds is not None and p.sizes.pipeline == stages_of_plan]
        label = f"{stages_of_plan} stage{'s' * (stages_of_plan > 1)}"
        points = [p.memory_bytes / 1e9 for p in fit], [p.step_seconds for p in fit]
        panel.scatter(*points, s=8, color=COLORS.get(color, "#999999"), label=label)
    best = found[0]
    panel.scatter([best.memory_bytes / 1e9], [best.step_seconds], s=90, facecolors="none", edgecolors="black")
    panel.set(title=title, xlabel="GB on the fullest rank", yscale="log")
panels[0].set_ylabel("seconds of a step, predicted")
panels[0].legend(frameon=False, fontsize=8)
show(
    figure,
    alt="Two scatter plots of all plans that fit, memory against predicted seconds, coloured by the number of pipeline "
    "stages. With NVLink the best plan has one stage; with a slow network the best one has several stages, and plans "
    "with one stage are several times slower.",
)

# %% [markdown]
# The circle marks the planner's choice. With NVLink many plans are nearly as good. Over the slow network the division decides.
# Replicas send all gradients, and with ZeRO all parameters too. ZeRO 3 does so for each microbatch: it fits, but a step takes
# more than a minute. A pipeline sends only activations at its boundaries. So no division is the best one for every case. The
# best one depends on the model, the batch, the memory of a device and the network.
#
# How good are such predictions? Compare those for the three axes with what you have measured above. First the planner measures
# how fast this machine computes, which takes about a second. For the link it takes the slow cable.

# %%
from hybrid_parallel.planner.machine import this_machine
from hybrid_parallel.planner.shapes import shape_of

model = TimeModel(shape_of("small"), this_machine(2, CABLE), batch=16)
for axis in AXES:
    predicted = model.predict(ParallelSizes(**{axis: 2}, microbatches=4)).total
    print(f"{axis:<10} predicted {predicted * 1e3:6.1f} ms      measured {steps[axis][1] * 1e3:6.1f} ms")

# %% [markdown]
# The three axes are in the right order, and a choice needs no more. The seconds are less exact, because a step of such a small
# model has many short operations and messages. The lesson's [README](../hybrid_parallel/README.md#5-plans) compares the planner
# with measurements of larger steps and with published runs.

# %% [markdown]
# ## After notebooks 11 and 12: sequences and experts
#
# Leave this section out for now, and come back to it after notebook 12. The mesh has a fourth axis, *context*, along which
# each sequence is cut. It lies between data and tensor, so the digits of a rank are stage, example, tokens, part of a layer.
# Experts have no digit of their own: ranks that have the same parameters and different tokens, the *replicas*, divide them.
# For this it does not matter whether the tokens are of different examples or of the same ones.
#
# Take 2 (data) · 2 (context) · 2 (tensor) ranks, and four experts in each block that neighbouring replicas divide, two on
# each. Rank 0 averages the gradients of its LayerNorms with its replicas: ranks 2, 4 and 6. **Predict**: with which of these
# does it average the gradients of its experts?

# %%
print(drawn(ParallelSizes(data=2, context=2, tensor=2)))
same = predict("With which rank does rank 0 average the gradients of its experts?", example=2)

# %%
# %%ranks
from expert_parallel.config import MoEConfig
from hybrid_parallel.expert_axis import Experts
from hybrid_parallel.traffic import traffic_of_axes
from hybrid_parallel.report import counted_by_axis

sizes = ParallelSizes(data=2, context=2, tensor=2, expert_ranks=2, pattern="ring")
mesh = Mesh(cluster, sizes)
x, y = batch_of(mesh, config, examples=16)
hybrid = HybridParallel(GPT(config), mesh, x, experts=Experts(MoEConfig(num_experts=4, top_k=2)))
LEDGER.clear()
hybrid.mean_loss(hybrid.backward(x, y))

groups = {"replicas": mesh.replicas, "context": mesh.context}
groups |= {"expert": hybrid.experts.experts, "same experts": hybrid.experts.replicas}
groups = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
counted, formula = counted_by_axis(LEDGER.rows()), traffic_of_axes(hybrid, is_clipped=False)
axes = ("data", "context", "expert", "tensor")
sent = {axis: (counted[axis].bytes_sent, formula[axis].bytes_sent) for axis in axes}

# %%
from lab.units import show_bytes

for name, ranks in pull("groups")[0].items():
    print(f"{name:<13} {ranks}")
for axis, (counted, formula) in pull("sent")[0].items():
    print(f"{axis:<13} {show_bytes(counted):>9} sent by rank 0      {show_bytes(formula):>9} by formula")
[other] = [rank for rank in pull("groups")[0]["same experts"] if rank != 0]
same.compare(other)

# %% [markdown]
# Ranks 0 and 2 cut the same sequences, hold different experts, and send tokens to each other. Ranks 4 and 6 do the same with
# other examples. Rank 4 has the same experts as rank 0, so these two average their gradients. All four replicas average
# everything else, because rank 2 has other tokens than rank 0, as rank 4 has. A rank has half of the tokens of its examples,
# so each message of the tensor axis is half as large as without the context axis. Experts add to them: each expert is
# divided, too, and a token passes two of them. What goes to experts depends on the routers, so its formula takes the numbers
# of tokens from the run itself. The lesson's
# [README](../hybrid_parallel/README.md#after-lessons-6-and-7-sequences-and-experts) has the formulas, and tells which gradient
# is completed in which group.

# %% [markdown]
# ## On a real cluster
#
# The same script, [train_hybrid.py](../hybrid_parallel/train_hybrid.py), runs there with the same kind of file. What changes is
# who starts the processes:
#
# ```
# bash scripts/launch_training.sh --config configs/config.yaml                  one machine
# RANKS_PER_NODE=4 sbatch scripts/slurm.sbatch --config configs/config.yaml     Slurm: two machines with four ranks each
# kubectl apply -f scripts/kubernetes.yaml                                      Kubernetes: an indexed Job
# ```
#
# On Slurm and Kubernetes the job continues after every interruption. [scripts/kubernetes.yaml](../scripts/kubernetes.yaml) names
# its own configuration.
#
# - Measure the links before you choose: `torchrun ... comm/tour.py` on the same machines prints alpha and beta (notebook 03).
# - Keep a tensor group inside a machine: `tensor` should divide the number of GPUs in a machine.
# - Save checkpoints in the background: `--checkpoint FOLDER --checkpoint-every 100`. Each rank saves its part, and a run on
#   another mesh can load the checkpoint. So a job that has lost a machine can go on with fewer ranks.
# - One slow or dead machine stops all others. Notebook 10 shows how to find it.
#
# [scripts/](../scripts/README.md) explains the files for Slurm and Kubernetes. Measured times of all techniques are in
# [What each technique gains](../docs/results.md).
#
# ## Exercises
#
# 1. `mesh` (20 minutes): which ranks form which group? Fill in the two functions; uncomment the last line.

# %%
from exercises.notebook import check


def coordinates_of(rank, sizes):
    ...  # {"pipeline": ..., "data": ..., "context": ..., "tensor": ...}; sizes.tensor is the number of places there


def groups_of(axis, sizes):
    ...  # a list of lists of ranks, such as [[0, 1], [2, 3]]


# check(coordinates_of, "mesh");

# %% [markdown]
# 2. `complete_gradients` (20 minutes) and then `clip_on_a_mesh` (20 minutes): which group completes a gradient, and which ranks
#    count it in the norm. `make exercises ARGS='watch clip_on_a_mesh'` checks your file each time you save it.
# 3. After the last section of [the lesson's page](../hybrid_parallel/README.md), `make exercises ARGS='bug
#    bug_clipping_d29'`: "runs with a pipeline clip harder". Find the mistake.
#
# ## Further reading
#
# - [hybrid_parallel/README.md](../hybrid_parallel/README.md): the lesson, in the order in which to read it
# - Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473), sections 2 and 3: how the three kinds combine, and what to choose
# - Grattafiori et al., "The Llama 3 Herd of Models", 2024, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3:
#   the order of the axes on 16,384 GPUs
# - [Device meshes in PyTorch](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.DeviceMesh)
# - Next: [10 When it breaks](10_when_it_breaks.ipynb)

# %%
# %ranks stop
