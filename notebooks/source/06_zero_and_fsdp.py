# ---
# jupyter:
#   jupytext:
#     formats: ipynb,source//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 ZeRO and FSDP
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/06_zero_and_fsdp.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** In data parallel every rank holds the same weights, the same gradients and the same optimizer state. What can
# be divided among the ranks instead, how much memory does that save, and what does it cost?
#
# You need about 40 minutes. The lessons beside this notebook are [train_zero1.py](../zero/train_zero1.py),
# [train_zero2.py](../zero/train_zero2.py), [train_zero3.py](../zero/train_zero3.py) and
# [train_fsdp.py](../zero/train_fsdp.py). You should know reduce-scatter and all-gather (notebook 02), and how a hook
# starts communication in the backward (notebook 05).

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

# %load_ext lab.notebook
# %ranks 4

# %% [markdown]
# A cell that begins with `%%ranks` runs on all four ranks at once, each a process of its own, and its variables stay
# there. `rank`, `world_size`, `device`, `torch` and `dist` (which is `torch.distributed`) are defined, and `cluster`,
# which knows the rank's place among the others. The value of the last line is shown for each rank, and once for ranks
# that have the same one. All other cells run here, in the notebook's own process; `pull("x")` brings the ranks' `x`
# here, as a dictionary by rank.

# %%
import torch
from matplotlib import pyplot as plt

from lab.notebook.picture import COLORS, show
from lab.notebook.prediction import predict

# %% [markdown]
# ## The budget
#
# A model of N parameters in float32 takes 4 N bytes. **Predict**: how many bytes *per parameter* does a training with AdamW
# hold, without activations, after its first step?

# %%
budget = predict("How many bytes for each parameter?", example=8, unit="bytes")

# %% [markdown]
# The lab's memory meter adds up the storages of tensors by class. The model is a small GPT of 0.8 million parameters.

# %%
from lab.trace.memory import live_bytes
from lab.models.model import GPT, GPTConfig, loss_of

config = GPTConfig.named("small")
tokens = torch.arange(4 * 65).view(4, 65) % 256


def held(model, optimizer, more=()):
    """Return the bytes for each parameter of the model: parameters, gradients, optimizer state, and more."""
    classes = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": [
            value for state in optimizer.state.values() for name, value in state.items() if name != "step"
        ],
        "more": list(more),
    }
    number = sum(p.numel() for p in model.parameters())
    sizes = live_bytes(classes)
    return {name: round(sizes[name] / number, 2) for name in classes}


model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters())
loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
optimizer.step()
held(model, optimizer)

# %%
budget.compare(sum(held(model, optimizer).values()))

# %% [markdown]
# 4 bytes for the parameter, 4 for its gradient, and 8 for AdamW, which keeps two running means for each parameter: one
# of the gradient, one of its square. The weights are only a quarter of what the training holds.
#
# **A common belief**: "then train in 16 bits, and need half". **Predict**: in *mixed precision* the model computes with
# bfloat16 weights (2 bytes) and gets bfloat16 gradients (2 bytes). AdamW updates a float32 copy of the weights, the
# *master weights*, because a small update would be lost: a bfloat16 keeps only 8 binary digits of a number. How many
# bytes per parameter?

# %%
mixed = predict("How many bytes for each parameter in mixed precision?", example=8, unit="bytes")

# %%
model = GPT(config).bfloat16()
master = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
optimizer = torch.optim.AdamW(master)
loss_of(model(tokens[:, :-1]).float(), tokens[:, 1:]).backward()
for full, p in zip(master, model.parameters(), strict=True):
    full.grad = p.grad.float()
optimizer.step()
optimizer.zero_grad()  # float32 gradients are there for the step only
with torch.no_grad():
    for full, p in zip(master, model.parameters(), strict=True):
        p.copy_(full)
held(model, optimizer, more=master)

# %%
mixed.compare(sum(held(model, optimizer, more=master).values()))

# %% [markdown]
# 2 + 2 + 4 + 8: the same 16 bytes. (While the optimizer steps, there are float32 gradients, too: another 4.) Mixed
# precision makes computing and sending cheaper, and activations smaller. It does not make the *state of the training*
# smaller. A model of 7 billion parameters needs 112 GB, and few clusters have devices of that size. Plain
# data parallel with 8 devices holds these 112 GB eight times.
#
# ## ZeRO 1 by hand
#
# In plain data parallel every rank computes the same update from the same optimizer state. It would be enough if *one*
# rank did it. So: each rank owns an n-th of the weights, its **shard**, updates only that, and the ranks exchange the
# results. Here are 8 weights on 4 ranks. Each rank has a gradient of its own.

# %%
# %%ranks
from comm.collectives import all_gather, reduce_scatter

weights = torch.arange(8.0)
gradient = torch.ones(8) * (rank + 1)
mine = torch.zeros(2)
reduce_scatter(mine, gradient, op="mean")
mine

# %% [markdown]
# The reduce-scatter gives each rank the mean gradient of its two weights; the mean of 1, 2, 3 and 4 is 2.5. Now each
# rank updates its two weights, here with a learning rate of 1. Adam would have state for these two numbers only,
# instead of eight. `shard` is a view: it shows a part of `weights`, so an update of it changes `weights`.

# %%
# %%ranks
shard = weights[2 * rank : 2 * rank + 2]
shard -= 1.0 * mine
weights

# %% [markdown]
# Four different models, each right in one place. An all-gather of the shards makes all of them right:

# %%
# %%ranks
all_gather(weights, shard)
weights

# %% [markdown]
# This is stage 1 of ZeRO, the *Zero Redundancy Optimizer*. [train_zero1.py](../zero/train_zero1.py) does the
# same with any model and any optimizer that treats each number on its own.

# %% [markdown]
# ## Four ways to train the same
#
# Each stage divides one thing more: stage 1 the optimizer state, stage 2 also the gradients, stage 3 also the
# parameters. In stage 1 the full gradients stay in every `.grad` until the step has ended, although a rank uses only
# its part of their mean. Stage 2 sends a bucket of gradients as soon as it is complete, keeps this rank's part, and
# frees the rest. Stage 3 does the same with the parameters. PyTorch's name for stage 3 is *Fully Sharded Data
# Parallel*, FSDP, and the lesson's class has the same name; it is our own. The next cell defines one training function
# for all of them; stage 0 is the bucket overlap of notebook 05. `MemoryReport` measures as `held` did above, on each
# rank, and the ledger counts the bytes that leave a rank.

# %%
# %%ranks
from data_parallel.train_bucket_overlap import BucketDataParallel
from zero.train_zero1 import ZeroOptimizer
from zero.train_zero2 import ZeroGradientOptimizer
from zero.train_zero3 import FullyShardedDataParallel, recompute_blocks
from lab.trace.memory import MemoryReport
from lab.trace.ledger import LEDGER
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import rank_slice

AdamW = torch.optim.AdamW


def make(stage, module, group=None):
    """Return the model to call, its optimizer, and the object that finishes the gradients."""
    if stage in (1, 2):
        sharded = (ZeroOptimizer if stage == 1 else ZeroGradientOptimizer)(module.parameters(), AdamW, group)
        return module, sharded, sharded
    parallel = (FullyShardedDataParallel if stage == 3 else BucketDataParallel)(module, group)
    return parallel, AdamW(parallel.parameters()), parallel


def train(stage, module, batch, group=None, steps=2):
    """Train some steps. Return the model and its memory report, and the bytes that the last step has sent."""
    model, optimizer, synchronise = make(stage, module, group)
    memory = MemoryReport(model, optimizer)
    share = rank_slice(batch, dist.get_rank(group), dist.get_world_size(group))
    for _ in range(steps):
        before = LEDGER.total().bytes_sent
        optimizer.zero_grad()
        with memory.forward():
            loss = loss_of(model(share[:, :-1]), share[:, 1:])
        loss.backward()
        synchronise.finish_gradient_sync()
        optimizer.step()
    return model, memory, LEDGER.total().bytes_sent - before


# %% [markdown]
# First the question that comes before all others: is it right? The ranks begin with different weights (`seed=rank`),
# and each wrapper broadcasts those of rank 0. Each stage trains two steps with AdamW, on 4 ranks, in double precision.
# One process does the same with the full batch. All weights are compared.

# %%
# %%ranks
batch = (torch.arange(8 * 33).view(8, 33) * 7) % 256
trained = {}
for stage in range(4):
    model, _, _ = train(stage, GPT(GPTConfig.named("tiny"), seed=rank if stage else 0).double(), batch)
    if stage == 3:
        trained[stage] = model.full_state_dict()
    else:
        trained[stage] = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}

# %%
from lab.check import assert_same, parameters

alone = GPT(GPTConfig.named("tiny"), seed=0).double()
optimizer = torch.optim.AdamW(alone.parameters())
batch = (torch.arange(8 * 33).view(8, 33) * 7) % 256
for _ in range(2):
    optimizer.zero_grad()
    loss_of(alone(batch[:, :-1]), batch[:, 1:]).backward()
    optimizer.step()
for stage, weights in pull("trained", [0])[0].items():
    expected = parameters(alone)
    assert_same({name: weights[name] for name in expected}, expected, what="weight")
    print(f"stage {stage}: {len(expected)} weights agree with those of one process")

# %% [markdown]
# All four agree with one process, up to the rounding of float64. They differ in memory and in messages only.
#
# ## What a rank holds
#
# **Predict** for stage 1 on 4 ranks: of the 16 bytes for each parameter, how many does a rank hold?

# %%
first_stage = predict("How many bytes for each parameter, stage 1 on 4 ranks?", example=4, unit="bytes")

# %%
# %%ranks
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
groups = {2: pairs[rank // 2], 4: None}
batch = (torch.arange(16 * 65).view(16, 65) * 7) % 256
held, sent = {}, {}
for n, group in groups.items():
    for stage in range(4):
        module = GPT(GPTConfig.named("small"))
        number = sum(p.numel() for p in module.parameters())
        _, memory, sent[n, stage] = train(stage, module, batch, group)
        one = memory.measure()
        held[n, stage] = [one[kind] / number for kind in ("parameters", "gradients", "optimizer_state")]
        del module, memory

# %%
held_by = pull("held", [0])[0]
first_stage.compare(sum(held_by[4, 1]))

# %% [markdown]
# Only the optimizer's 8 bytes are divided by 4, and 4 + 4 + 8/4 is 10. With n ranks a rank holds, in bytes for each parameter:
#
# | stage | divided | formula | n = 4 | n = 64 |
# |---|---|---|---|---|
# | 0 | nothing | 4 + 4 + 8 | 16 | 16 |
# | 1 | optimizer state | 4 + 4 + 8/n | 10 | 8.1 |
# | 2 | and gradients | 4 + (4 + 8)/n | 7 | 4.2 |
# | 3 | and parameters | (4 + 4 + 8)/n | 4 | 0.25 |
#
# The lines below are these formulas, and the points are measured, on two and on four ranks. They count what *stays* in memory.
# For a short time a rank has more: buckets that are sent, and in stage 3 full parameters of the layer that computes.

# %%
from zero.memory import Held, formula

ranks = [2**k for k in range(7)]
styles = zip(("compute", "forward", "backward", "communication"), "o^sD", strict=True)
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
for stage, (color, marker) in enumerate(styles):
    each = [formula(stage, Held(4, 4, 8), n) for n in ranks]
    line = [one.parameters + one.gradients + one.optimizer_state for one in each]
    axes.plot(ranks, line, color=COLORS[color], lw=1)
    measured = [sum(held_by[n, stage]) for n in (2, 4)]
    axes.plot((2, 4), measured, marker, color=COLORS[color], label=f"stage {stage}, measured")
axes.set(xscale="log", xlabel="ranks", ylabel="bytes for each parameter", ylim=(0, 17))
axes.set_xticks(ranks, [str(n) for n in ranks])
axes.minorticks_off()
axes.legend()
show(
    figure,
    alt="Bytes for each parameter against the number of ranks, one line for each stage: stage 0 stays at 16, stage 1 "
    "falls to 8, stage 2 to 4, stage 3 to nearly 0. The measured points for two and four ranks lie on the lines.",
)

# %% [markdown]
# With many ranks stage 1 comes down to 8 bytes, stage 2 to 4, and only stage 3 continues to fall. The same formula for a model of
# 7 billion parameters on 8 devices:

# %%
for stage in range(4):
    one = formula(stage, Held(4 * 7, 4 * 7, 8 * 7), 8)
    print(f"stage {stage}: {one.parameters + one.gradients + one.optimizer_state:5.1f} GB on each device")

# %% [markdown]
# Without ZeRO it fits on no device of 80 GB. With stage 1 it does, with 17 GB left for activations and buffers, and
# stage 3 leaves plenty of room.
#
# ## What a rank sends
#
# **Predict**: an all-reduce of the gradients
# was not needed here, but a reduce-scatter of the gradients and an all-gather of the weights. How many times the bytes
# of plain data parallel does a rank send?

# %%
stage_1 = predict("How many times the bytes of plain data parallel?", example=1.5, unit="times")

# %%
sent = pull("sent", [0])[0]
print({f"stage {stage}": round(sent[4, stage] / sent[4, 0], 2) for stage in (1, 2)})
stage_1.compare(round(sent[4, 1] / sent[4, 0], 2))

# %% [markdown]
# As many bytes as before! Notebook 02 said why: an all-reduce *is* a reduce-scatter and then an all-gather. Plain data parallel
# does both one after the other; stage 1 puts the optimizer between them. Each half sends (n-1)/n P, where P is the size
# of all parameters. So stages 1 and 2 send no more bytes than before, and save memory. (One thing is lost: the all-gather now
# carries weights that the optimizer has just updated. It starts after the backward, so the backward cannot hide it.)
#
# Stage 3 frees the weights after each use, so it must gather them before each use: in the forward, and again in the backward.
# **Predict**: how many times the bytes of plain data parallel does stage 3 send?

# %%
stage_3 = predict("How many times the bytes, stage 3?", example=2, unit="times")

# %%
stage_3.compare(round(sent[4, 3] / sent[4, 0], 2))

# %% [markdown]
# Two all-gathers and one reduce-scatter are 3 P instead of 2 P: 1.5 times as much. It is less here, because some parameters are
# not freed between forward and backward, and are gathered once: the last block, with which the backward begins, and the **root**
# (the embeddings and the last norm).
#
# Two P or three P is the price. Whether you feel it depends on the link, because most of these bytes travel while the blocks
# compute. Here are a forward and a backward of stage 3 with 8 blocks, on a simulated link of 1 Gbit/s (the shortest of four):

# %%
# %%ranks
from comm.wire import slow_link
from lab.trace import timeline
from lab.trace.overlap import overlap_of
from lab.trace.timeline import span

batch = rank_slice((torch.arange(32 * 65).view(32, 65) * 7) % 256, rank, world_size)


def seconds_of(events):
    return (max(e.end_ns for e in events) - min(e.start_ns for e in events)) / 1e9


def shortest_of(wrapper):
    """Return the spans of the shortest of four forwards and backwards on a link of 1 Gbit/s."""
    parallel, runs = wrapper(GPT(GPTConfig.named("small", num_layers=8))), []
    slow_link.use(slow_link.parse("1gbit,0.1ms"))
    for _ in range(4):
        timeline.start_recording()
        with span("forward", "forward"):
            loss = loss_of(parallel(batch[:, :-1]), batch[:, 1:])
        with span("backward", "backward"):
            loss.backward()
        parallel.finish_gradient_sync()
        timeline.stop_recording()
        runs.append(timeline.recorded())
    slow_link.use(None)
    return min(runs, key=seconds_of)


shortest, plain = shortest_of(FullyShardedDataParallel), shortest_of(BucketDataParallel)

# %%
from lab.notebook.picture import show_events

show_events(
    pull("shortest", [0])[0],
    alt="Timeline of stage 3 on one rank: below forward and backward, all-gathers and reduce-scatters run on a "
    "lane of their own, most of them while the blocks compute; the rank waits at a few points.",
)
hidden = pull("overlap_of(shortest)", [0])[0]
print(f"{hidden.hidden_seconds:.3f} s of communication are hidden, of {hidden.communication_seconds:.3f} s")
for name, stage in (("shortest", 3), ("plain", 0)):
    print(f"stage {stage}: forward and backward take {pull(f'seconds_of({name})', [0])[0]:.2f} s")

# %% [markdown]
# Read it from left to right. The orange row is the communication, on a thread of its own: in the forward it gathers one
# block after the other, in the backward it gathers them again and reduce-scatters the gradients of those that are done.
# (The black marks are the launches of these reduce-scatters.) The grey row is the rank that waits: for a block that is
# not there yet, and at the end for the last gradients. The orange piece on the right is the rest, after the backward.
# The last two lines compare the time with that of stage 0, which sends less: the difference is what you pay on this
# link. The table in [zero/README.md](../zero/README.md) has step times beside those of FSDP2.
#
# ## Stage 3 from inside
#
# How can a rank compute with weights that it does not have? It gathers a **block** (one layer, or several) just before
# the block computes, and frees it right after. In memory a block's parameters are one flat tensor, a **unit**. While one
# block computes, the next one is already being gathered. Let us watch BabyCNN, the network of
# notebook 04, with each of its four layers as a block. The next cell notes at each step which blocks are full, and
# which are on their way.

# %%
# %%ranks
from lab.models.digits import load_digits
from lab.models.model import BabyCNN

images, labels, *_ = load_digits()
x, y = rank_slice(images[:64], rank, world_size), rank_slice(labels[:64], rank, world_size)


def watch(parallel, modules, x, y):
    """Return for each moment of a step what computes, what is full, what is on its way, and the size of all."""
    moments = []

    def note(what):
        blocks = dict(zip(("root", *modules), parallel.blocks, strict=True))
        blocks = {name: units for name, units in blocks.items() if units}
        full = [name for name, units in blocks.items() if all(unit.is_full for unit in units)]
        gathered = [name for name, units in blocks.items() if not any(unit.is_freed for unit in units)]
        size = sum(unit.full.numel() for unit in parallel.units if not unit.is_freed)
        moments.append((what, full, [name for name in gathered if name not in full], size))

    def after_forward(name, output):
        output.register_hook(lambda _: note(f"backward {name}"))

    for name, block in modules.items():
        block.register_forward_pre_hook(lambda *_, name=name: note(f"forward {name}"))
        block.register_forward_hook(lambda _, __, output, name=name: after_forward(name, output))
    loss_of(parallel(x), y).backward()
    parallel.finish_gradient_sync()
    note("after the step")
    return moments


cnn = BabyCNN(seed=0)
layers = dict(cnn.named_children())
parallel = FullyShardedDataParallel(cnn, blocks=list(layers.values()))
moments = watch(parallel, layers, x, y)

# %%
moments = pull("moments", [0])[0]
print(f"{'':18} {'full':18} being gathered")
for what, full, coming, _ in moments:
    print(f"{what:18} {', '.join(full):18} {', '.join(coming)}".rstrip())

# %% [markdown]
# Read it from top to bottom. In the forward the next layer is always on its way. In the backward it goes the other way
# round. The last layer stays full in between, because the backward begins with it. After the step no layer is full: the
# rank has its shards and nothing else.
#
# ## What to wrap
#
# Never more than two of the four layers are there at the same time. **Predict**: at the worst moment, what share of
# BabyCNN's parameters is on a rank?

# %%
peak = predict("Which share of all parameters is gathered at the worst moment?", example=0.5)

# %%
number = pull("sum(unit.layout.numel - unit.layout.padding for unit in parallel.units)", [0])[0]
peak.compare(round(max(size for *_, size in moments) / number, 2))

# %% [markdown]
# Nearly everything! Four layers are not four quarters. These are BabyCNN's parameters:

# %%
from lab.models.model import BabyCNN

sizes = {name: sum(p.numel() for p in layer.parameters()) for name, layer in BabyCNN().named_children()}
sizes

# %% [markdown]
# `linear1` has nine tenths of them, so at the moment when it computes, nine tenths are there. What counts at the peak is not
# the number of blocks but the **largest two neighbours**. Stage 3 pays where a model consists of many blocks of equal size, as
# a transformer does. Here are both, and a GPT as one single block, through a step:


# %%
# %%ranks
def watch_gpt(wrap):
    gpt = GPT(GPTConfig.named("small", num_layers=8))
    blocks = wrap(gpt)
    parallel = FullyShardedDataParallel(gpt, blocks=blocks)
    batch = rank_slice((torch.arange(8 * 65).view(8, 65) * 7) % 256, rank, world_size)
    before = LEDGER.total()
    modules = {f"block {i}": block for i, block in enumerate(blocks)}
    seen = watch(parallel, modules, batch[:, :-1], batch[:, 1:])
    messages = (LEDGER.total() - before).messages_sent
    return [size / sum(u.layout.numel for u in parallel.units) for *_, size in seen], messages


linears = lambda gpt: [layer for layer in gpt.blocks.modules() if isinstance(layer, torch.nn.Linear)]
shares = {
    "GPT, everything is one block": watch_gpt(lambda gpt: [gpt]),
    "GPT, each transformer block": watch_gpt(lambda gpt: list(gpt.blocks)),
    "GPT, each linear layer": watch_gpt(linears),
}

# %%
shares = pull("shares", [0])[0]
shares["BabyCNN, each layer"] = [size / number for *_, size in moments], 0
figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
styles = zip(("wait", "compute", "backward", "communication"), ("-", "-", "--", ":"), strict=True)
for (name, (share, _)), (color, style) in zip(shares.items(), styles, strict=True):
    progress = [i / (len(share) - 1) for i in range(len(share))]
    axes.step(progress, share, style, where="post", color=COLORS[color], label=name)
axes.set(xlabel="progress of a step: forward, then backward", ylabel="gathered share", ylim=(0, 1.05))
figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
show(
    figure,
    alt="The gathered share of the parameters through a step. One single block: everything, all the time. BabyCNN by "
    "layers: little at the ends, nearly everything in the middle. GPT by transformer blocks: about a quarter. GPT by "
    "linear layers: a tenth or less.",
)
for name, (share, messages) in shares.items():
    print(
        f"{name:30} at most {max(share):.2f} gathered" + (f", {messages} messages a step" if messages else "")
    )

# %% [markdown]
# One block for everything is stage 3 in name only. With transformer blocks two of eight are there, and the root. Single
# layers gather least, and need many more messages, each with its latency. The transformer block is the usual choice:
# small beside the model, large beside a latency. PyTorch's `fully_shard` leaves this choice to you, too: you call it on
# each module that should be a unit. FSDP1 had an `auto_wrap_policy`, a function that chooses them.
#
# ## The same with PyTorch's FSDP2
#
# `fully_shard` changes a module in place. Each parameter becomes a `DTensor`, a tensor that knows its shards. It is cut
# between *rows*. This is what each rank has of BabyCNN:

# %%
# %%ranks
from zero.train_fsdp import full_state_dict, shard

sharded = shard(BabyCNN(seed=rank), device)
{name: list(p.to_local().shape) for name, p in sharded.named_parameters() if "weight" in name}

# %% [markdown]
# `linear2` has 10 rows, and 4 ranks get 3, 3, 3 and 1 of them. Our flat units are cut anywhere, so all ranks get the
# same number of elements. Both give the gradients of one process:

# %%
# %%ranks
loss_of(sharded(x), y).backward()
from_fsdp = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}

# %%
from lab.check import reference_gradients
from lab.models.digits import load_digits

images, labels, *_ = load_digits()
expected = reference_gradients(BabyCNN(seed=0), lambda model: loss_of(model(images[:64]), labels[:64]))
assert_same(pull("from_fsdp", [0])[0], expected, rtol=1e-4)
print(f"{len(expected)} gradients of FSDP2 agree with those of one process (in float32).")

# %% [markdown]
# [train_fsdp.py](../zero/train_fsdp.py) has the table of differences.
#
# ## What is left: activations
#
# ZeRO does not touch the **activations**, what autograd keeps of a forward for its backward. They grow with the batch
# and the length of the text. A way to save them is *recomputation* (also called activation checkpointing): keep only
# the input of each block, and compute the rest a second time in the backward. A block of our GPT keeps tensors of 16
# times its input's size, and 1 of them is its input. **Predict**: how many times fewer bytes of activations does a GPT
# with 8 blocks keep, together with what lies before and behind the blocks?

# %%
fewer = predict("How many times fewer activations?", example=2, unit="times")

# %%
# %%ranks
batch = (torch.arange(16 * 65).view(16, 65) * 7) % 256
totals, gradients, forwards = {}, {}, {}
for name, stage, recompute in (
    ("no ZeRO", 0, False),
    ("stage 3", 3, False),
    ("stage 3, recomputed", 3, True),
):
    gpt, count = GPT(GPTConfig.named("small", num_layers=8)), []
    for block in gpt.blocks:
        block.attention.register_forward_pre_hook(lambda *_, count=count: count.append(1))
    if recompute:
        recompute_blocks(gpt)
    model, memory, _ = train(stage, gpt, batch, steps=1)
    one = memory.measure()
    totals[name] = {
        "parameters": one["parameters"],
        "gradients": one["gradients"],
        "optimizer state": one["optimizer_state"],
        "activations": one["activations"],
    }
    gradients[name] = [p.grad.clone() for p in model.parameters()]
    forwards[name] = len(count)
pairs = zip(gradients["stage 3"], gradients["stage 3, recomputed"], strict=True)
print("gradients are equal bit for bit:", all(torch.equal(one, other) for one, other in pairs))

# %%
totals, forwards = pull("totals", [0])[0], pull("forwards", [0])[0]
fewer.compare(round(totals["stage 3"]["activations"] / totals["stage 3, recomputed"]["activations"], 1))

# %%
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
colors = ("compute", "backward", "optimizer", "data")
left = [0.0] * len(totals)
for kind, color in zip(next(iter(totals.values())), colors, strict=True):
    widths = [held[kind] / 1e6 for held in totals.values()]
    axes.barh(list(totals), widths, left=left, color=COLORS[color], label=kind, edgecolor="white")
    left = [a + b for a, b in zip(left, widths, strict=True)]
axes.set(xlabel="MB on a rank, of four ranks")
axes.invert_yaxis()
axes.legend(fontsize=8)
show(
    figure,
    alt="Three stacked bars. Without ZeRO, parameters, gradients and optimizer state take more than the activations; "
    "with stage 3 they take a quarter of that, and the activations are most of what is left; with recomputation the "
    "activations are small, too.",
)
print({name: f"{number} forwards of blocks" for name, number in forwards.items()})

# %% [markdown]
# Less than 16 times, because the embedding and the head keep what they kept before. The gradients are the same, bit for
# bit, and each block's forward runs twice. A forward is about a third of a step's computing, so you pay with about a
# third more computing. And notice the second bar: after ZeRO 3 the activations are what fills the memory. So both are
# used together.
#
# Three ways to use less memory, then: *divide* it among ranks (and send more), *recompute* it (and compute more), or
# *move* it to the host's memory, and fetch it when it is needed (*offload*).
#
# ## Keep, recompute, or move to the host
#
# A GPU's host has ten times its memory, behind a link of 30 to 60 GB/s (PCIe). The last two ways are choices for each tensor that
# autograd wants to keep. Let us see all three, on a device that is played by the clock: eight layers, each takes 10 ms in the
# forward and 20 ms in the backward, has an input of 0.25 MB, and keeps 1 MB for its backward. The arithmetic is real, and so are
# the tensors. We note each tensor that is made on the "device", and ask at each moment how many of them are still there.

# %%
import time
from concurrent.futures import ThreadPoolExecutor

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lab.trace import timeline
from lab.trace.timeline import span

torch.set_num_threads(1)  # the clock is what takes time here
LAYERS, SECONDS = 8, 0.01
made, memory = [], []  # tensors on the device; their MB at each moment


def on_device(tensor):
    """Note a tensor that was made on the device, and how many MB are there now."""
    made.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
    made[:] = [one for one in made if not one[0].expired()]
    memory.append((timeline.now(), sum(size for _, size in made) / 2**20))
    return tensor


class Layer(torch.autograd.Function):
    """Computes the sine four times, and keeps the four numbers to which it was applied."""

    @staticmethod
    def forward(ctx, x):
        with span("F", "forward"):
            time.sleep(SECONDS)
            steps = [x]
            for _ in range(4):
                steps.append(steps[-1].sin())
            ctx.save_for_backward(on_device(torch.stack(steps[:4])))
            return on_device(steps[4])

    @staticmethod
    def backward(ctx, grad):
        [steps] = ctx.saved_tensors  # may have to wait for it
        with span("B", "backward"):
            time.sleep(2 * SECONDS)
            return on_device(grad * steps.cos().prod(0))


# %% [markdown]
# PyTorch has a place where such choices are made: `saved_tensors_hooks`. `pack` is called with each tensor that autograd wants to
# keep, and autograd keeps what it returns instead. `unpack` gives the tensor back in the backward. Ours sends it to the
# host on a thread of its own, as a GPU does with its copy engine. And when the backward asks for one, it also starts to fetch
# the one before, which is needed next.

# %%
class Host:
    """Moves what autograd keeps to the host, over a link with so many MB in a second, and back."""

    def __init__(self, rate):
        self.rate, self.link = rate, ThreadPoolExecutor(1, "copy")
        self.there, self.coming = [], {}

    def copy(self, name, tensor):
        start = timeline.now()
        time.sleep(tensor.nbytes / 2**20 / self.rate)
        timeline.record(name, "communication", start, timeline.now(), lane="copy")
        return tensor.clone()

    def pack(self, tensor):
        self.there.append(self.link.submit(self.copy, "out", tensor))
        return len(self.there) - 1

    def fetch(self, number):
        if number >= 0 and number not in self.coming:
            self.coming[number] = self.link.submit(
                lambda: on_device(self.copy("in", self.there[number].result()))
            )

    def unpack(self, number):
        self.fetch(number)
        self.fetch(number - 1)
        with span("wait", "wait"):
            return self.coming.pop(number).result()


def run(choice, rate=125):
    """Return the gradient, the events, and the memory at each moment in (ms, MB)."""
    made.clear()
    memory.clear()
    host = Host(rate)
    x = torch.linspace(0, 1, 2**16, requires_grad=True)
    timeline.start_recording()
    y = x
    for _ in range(LAYERS):
        if choice == "recompute":
            y = checkpoint(Layer.apply, y, use_reentrant=False)
        elif choice == "move":
            with torch.autograd.graph.saved_tensors_hooks(host.pack, host.unpack):
                y = Layer.apply(y)
        else:
            y = Layer.apply(y)
    y.sum().backward()
    timeline.stop_recording()
    return x.grad, timeline.recorded(), [((at - memory[0][0]) / 1e6, size) for at, size in memory]


# %% [markdown]
# The link moves a layer's MB in 8 ms, a little less than the layer computes. **Predict**: how many times as long as with "keep"
# does the step take, if everything is moved to the host and back?

# %%
moved = predict("If everything is moved, a step takes how many times as long?", example=2, unit="times as long")

# %%
def seconds_of(events):
    return (max(event.end_ns for event in events) - min(event.start_ns for event in events)) / 1e9


runs = {}
for choice in ("keep", "recompute", "move"):
    runs[choice] = min((run(choice) for _ in range(5)), key=lambda one: seconds_of(one[1]))
    gradient, events, sizes = runs[choice]
    same = torch.equal(gradient, runs["keep"][0])
    print(f"{choice:<10} {seconds_of(events) * 1e3:.0f} ms, the gradient is that of keep, bit for bit: {same}")
moved.compare(seconds_of(runs["move"][1]) / seconds_of(runs["keep"][1]))

# %%
show_events(
    {choice: events for choice, (_, events, _) in runs.items()},
    alt="Three timelines of eight layers. Keep: eight forwards, eight backwards. Recompute: a forward before each backward, so a "
    "third longer. Move: as long as keep, with copies below, out in the forward and in in the backward.",
)

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for (choice, (_, _, sizes)), color in zip(runs.items(), ("wait", "forward", "communication"), strict=True):
    axes.step(*zip(*sizes, strict=True), where="post", color=COLORS[color], label=choice)
axes.set(xlabel="time (ms)", ylabel="MB on the device", ylim=(0, None))
axes.legend(frameon=False)
show(
    figure,
    alt="Memory over time. Keep rises to more than eight MB at the end of the forward and falls again. Recompute rises to three MB "
    "and falls slowly in a longer backward. Move stays between one and three MB.",
)
for choice in ("keep", "recompute"):
    print(f"{choice:<10} at most {max(size for _, size in runs[choice][2]):.2f} MB")

# %% [markdown]
# "Keep" is fast, and holds the sum of all layers. "Recompute" holds the layers' inputs and one layer, and each backward begins with
# a second forward: a third more time. "Move" hardly takes longer, *if* the link is faster than the computing, and there is time
# before the tensor is needed. What was kept last comes back at once, so the first backward has to wait. Choose for each tensor:
#
# | choice | what it costs | choose it for |
# |---|---|---|
# | keep | memory from the forward to the backward | what fits, above all the last layers: they are needed first |
# | recompute | its operations a second time | what is large and cheap to compute: norms, GELU, dropout, scores of attention |
# | move | its bytes twice over the link to the host | what is expensive to compute for its size, and needed late |
#
# Change `rate` to 60 and run the cells again: the copies take longer than the computing, and the backward waits for each of them.
# In PyTorch: `torch.utils.checkpoint`, with a `context_fn` that chooses by operation, and `torch.autograd.graph.save_on_cpu`. The
# optimizer state, which is needed once in a step only, is moved more often than activations (ZeRO-Offload, Ren et al., 2021).
#
# ## Exercises
#
# Each has a file, and `make exercises ARGS='watch zero1'` grades it with the lesson's own tests whenever you save it.
#
# 1. **`memory_formulas`** (20 minutes): what a rank holds at each stage, to the byte:
#    `exercises/zero/memory_formulas.py`. **`zero_shards`** (30 minutes): which part of each parameter is this rank's:
#    `exercises/zero/zero_shards.py`.
# 2. **`zero1`** (75 minutes): what you did by hand with 8 weights, for any model:
#    `exercises/zero/zero1.py`. **`zero2`** (45 minutes) continues from there.
# 3. **`zero3`** (120 minutes, hard): gather, use, free: `exercises/zero/zero3.py`.
#
# **Find the bug**, after the last section of [the lesson's page](../zero/README.md): `make exercises ARGS='bug
# bug_zero2_6f8'` makes a file with a wrong implementation, whose symptom is "stage 2 needs as much memory as stage 1". Find
# the mistake and correct it.
#
# And with this notebook: on devices of 24 GB, with stage 3, how many do you need for 7 billion parameters, without
# activations? Compute it with `formula`. And choose `blocks` for BabyCNN so that the largest gathered share is
# smallest, and check it with `watch`. Why does no choice help much?
# <details><summary>Answer</summary>112 GB / 24 GB is 4.7, so 5 devices. In BabyCNN the largest gathered share can never
# be less than that of <code>linear1</code>, which is nine tenths; only a division of that layer itself would
# help.</details>
#
# ## Further reading
#
# - [train_zero1.py](../zero/train_zero1.py): how an ordinary optimizer updates a shard, without knowing it
# - Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
#   https://arxiv.org/abs/1910.02054: figure 1 is the plot above
# - Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023,
#   https://arxiv.org/abs/2304.11277
# - Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174: recomputation
# - Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021, https://arxiv.org/abs/2101.06840
#
# Next: [07 Tensor and sequence parallel](07_tensor_and_sequence_parallel.ipynb). In ZeRO every rank still computes
# every layer for its part of the batch. In tensor parallel a layer itself is divided.

# %%
# %ranks stop
