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
# # 08 Pipelines
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/08_pipelines.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** A model is too large for one device, so each rank holds some of its layers. A layer needs the output of the
# layer before it. How can the ranks work at the same time, and when is a pipeline faster than one device after the other?
#
# You need about 40 minutes. The lesson beside this notebook is [pipeline_parallel](../pipeline_parallel/README.md). You
# need to know `%%ranks` and `predict` from [notebook 02](02_collectives.ipynb): a cell that begins with `%%ranks` runs on
# all ranks, and `predict` asks for your guess before the run.

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

# %load_ext lab.notebook
# %ranks 3

# %%
from lab.notebook.prediction import predict

# %% [markdown]
# ## Layers on ranks
#
# Three ranks, and a model of three layers. Each layer multiplies by one number: 2 on rank 0, 3 on rank 1, 4 on rank 2. The
# layers of a rank are its *stage*, and what goes from stage to stage is an *activation*. A rank receives, computes and
# sends. Rank 0 begins with the number 1.

# %%
# %%ranks
stage = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(stage.weight, rank + 2)

if rank == 0:
    given = torch.ones(1, 1)
else:
    given = torch.empty(1, 1)
    dist.recv(given, src=rank - 1)
given.requires_grad_()  # so that autograd computes its gradient, too
made = stage(given)
if rank < 2:
    dist.send(made.detach(), dst=rank + 1)
given.item(), made.item()

# %% [markdown]
# The forward works: 1 becomes 2, 6 and 24. For the backward, let the loss be the last number, 24. **Predict**: what is the
# gradient of rank 0's weight?

# %%
gradient = predict("What is the gradient of the weight on rank 0?", example=24)

# %% [markdown]
# Autograd knows nothing about other ranks. On each rank its graph begins at `given` and ends at `made`. So two things have
# to be done by hand:
#
# - `given` is a *leaf* of the graph: a tensor that no operation of this rank has made. For a leaf that requires a gradient,
#   autograd leaves the result in its `.grad`. `given.grad` is the gradient of the previous rank's output: send it there.
# - `made` is not a leaf. Its gradient does not come from this rank, but from the next one, and is handed over with
#   `made.backward(gradient)`. Only the last rank has a loss, and begins without a gradient.

# %%
# %%ranks
gradient = None
if rank < 2:
    gradient = torch.empty_like(made)
    dist.recv(gradient, src=rank + 1)
made.backward(gradient)
if rank > 0:
    dist.send(given.grad, dst=rank - 1)
given.is_leaf, made.is_leaf, given.grad.item(), stage.weight.grad.item()

# %%
gradient.compare(pull("stage.weight.grad.item()")[0])

# %% [markdown]
# The gradient is 1 · 3 · 4 = 12: rank 0's input, times the weights of the other ranks. Rank 0 has never seen those weights.
# All that it needed was one number from rank 1. That is why pipelines send so little: one activation forward and one
# gradient back over each boundary, however many parameters a stage has.
#
# If you forget `requires_grad_()`, `given.grad` stays `None`, and the ranks before get nothing. If you send `made` without
# `detach()`, nothing breaks, but the line pretends that the graph continues in the other rank. It does not.
#
# ## Sends and receives come in pairs
#
# Here is a small trap. In the middle of a training step, rank 0 wants to send the next activation to rank 1, and rank 1
# wants to send a gradient back to rank 0. Both send first, and then both receive. **Predict**: how many of the two ranks
# return from `send`?

# %%
returned = predict("How many of the two ranks return from send?", example=2)

# %% [markdown]
# The function runs on two other ranks for at most three seconds. `run_ranks` ends them and says where each of them was.

# %%
import torch
import torch.distributed as dist

from lab.ranks import RankError, run_ranks


def both_send_first(cluster):
    mine, theirs, peer = torch.ones(4), torch.empty(4), 1 - cluster.rank
    dist.send(mine, dst=peer)
    print("returned from send")
    dist.recv(theirs, src=peer)


report = ""
try:
    run_ranks(both_send_first, 2, timeout=3)
except RankError as error:
    report = str(error)
print(report)

# %%
returned.compare(2 - report.count("dist.send"))

# %% [markdown]
# None. Both are stuck in the line with `send`: it returns when the receiver has taken the message, and each receiver is
# still sending. Each rank waits for the next one in a cycle: that is a *deadlock*. Libraries that buffer small messages
# hide it until the tensors become larger. Two rules help. Post the receive before you send, with `irecv` and `isend`,
# which return at once; then wait for both. Or let PyTorch pair them: `dist.batch_isend_irecv`.

# %%
# %%ranks
outcome = "rank 2 only watches"
if rank < 2:
    mine, theirs, peer = torch.ones(4) * rank, torch.empty(4), 1 - rank
    arriving = dist.irecv(theirs, src=peer)
    leaving = dist.isend(mine, dst=peer)
    arriving.wait()
    leaving.wait()
    outcome = theirs
outcome

# %% [markdown]
# In the lesson, all sends and receives are derived from a schedule, and the receives are posted early:
# [pipeline_parallel/messages.py](../pipeline_parallel/messages.py).
#
# ## One rank at a time
#
# What you have just done is *naive* model parallelism: while rank 2 computes, ranks 0 and 1 wait. To see the time we need
# one device for each rank, and your laptop has only a few cores. So from here on computing is replaced by a *metronome*: a
# forward takes 50 ms of sleep, one *tick*, and a backward takes two ticks, because it computes two gradients, that of the
# input and that of the weights. Messages stay real.

# %%
# %%ranks
from comm.clocks import gather_events
from lab.trace import timeline
from pipeline_parallel.pipeline import Pipeline
from pipeline_parallel.schedules import table_of
from lab.trace.makespan import bubble, makespan

TICK = 0.05
features, targets = torch.randn(48, 8), torch.randn(48, 8)


def pipeline_of(schedule, microbatches, tick=None):
    """Cut a model of small layers into stages; with a tick, the metronome replaces computing."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(2 * world_size)]
    table = table_of(schedule, world_size, microbatches)
    example = features[: len(features) // microbatches]
    return Pipeline(layers, table, torch.nn.functional.mse_loss, example, tick=tick)


def play(schedule, microbatches, tick=TICK):
    """Run three steps by the metronome; return the actions of the fastest one, of all ranks, on rank 0."""
    pipeline, steps = pipeline_of(schedule, microbatches, tick), []
    for _ in range(3):
        dist.barrier()
        timeline.start_recording()
        pipeline.step(features, targets)
        timeline.stop_recording()
        actions = [event for event in timeline.recorded() if "action" in event.args]
        steps.append(gather_events(actions))
    return min(steps, key=makespan) if rank == 0 else None


naive = play("naive", microbatches=1)

# %%
from lab.notebook.picture import show_events

show_events(
    pull("naive")[0],
    alt="Gantt chart of naive model parallelism on three ranks: forwards go down the ranks one after the other, "
    "backwards come up again, and at any time exactly one rank computes.",
)

# %% [markdown]
# Time goes to the right. At each moment one rank computes and two are idle. Three devices are as fast as one. The idle
# share of the picture is called the *bubble*; here it is 2/3.
#
# ## Microbatches, by hand
#
# GPipe cuts the batch into *microbatches*. When rank 0 has sent microbatch 0, it begins with microbatch 1 while rank 1
# works on microbatch 0. All forwards come first, in this order; then all backwards. Here are the forwards as *clock
# cycles*: the pairs (microbatch, stage) that run at the same time.

# %%
from pipeline_parallel.schedules import clock_cycles

for tick, pairs in enumerate(clock_cycles(microbatches=2, stages=3)):
    print(f"tick {tick}: {pairs}")

# %% [markdown]
# Now take a pencil. Three ranks, two microbatches, a forward (F) takes one tick and a backward (B) two. The forwards are
# drawn; put in B0 and B1 for each rank. B0 of rank 2 needs only its own F0, but in GPipe it comes after F1. B0 of rank 1
# needs the gradient of rank 2's B0.
#
# ```
# tick      0  1  2  3  4  5  6  7  8  9  10 11 12 13 ...
# rank 0    F0 F1
# rank 1       F0 F1
# rank 2          F0 F1
# ```
#
# **Predict**: how many ticks does it take until the last backward ends? One device would take 2 · 3 · 3 = 18 ticks.

# %%
ticks = predict("How many ticks does the step take?", example=9, unit="ticks")

# %%
# %%ranks
measured = play("gpipe", microbatches=2)
ticks = round(makespan(measured) / TICK) if rank == 0 else None

# %%
from pipeline_parallel.schedules import table_of
from pipeline_parallel.analysis.simulate import Costs, simulate

by_hand = simulate(table_of("gpipe", 3, 2), Costs.equal(3, 0.05, 0.05, 0.05))
show_events(
    {"by hand": by_hand.events(), "measured": pull("measured")[0]},
    alt="Two Gantt charts of GPipe on three ranks with two microbatches, by hand and measured. They look the same: "
    "forwards form a staircase downwards, backwards one upwards, and the corners are idle.",
)

# %%
ticks.compare(pull("ticks")[0])

# %% [markdown]
# Many guess 9: two microbatches at 3 ticks, and a little more. It is (m + p - 1) · 3 = 12 ticks for m microbatches on p
# ranks. Each rank computes for m · 3 = 6 of them. The other (p - 1) · 3 = 6 ticks are the staircase at the beginning and
# the one at the end. The staircases are as long with 2 microbatches as with 200, so more microbatches make the bubble a
# smaller share: (p - 1) / (m + p - 1).
#
# The same with 1 to 16 microbatches. The batch stays the same, so a tick is 100 ms divided by their number.

# %%
# %%ranks
COUNTS = [1, 2, 4, 8, 16]
bubbles = []
for microbatches in COUNTS:
    events = play("gpipe", microbatches, tick=0.1 / microbatches)
    bubbles.append(bubble(events, world_size) if rank == 0 else None)

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show
from pipeline_parallel.analysis import theory

counts, bubbles = pull("COUNTS")[0], pull("bubbles")[0]
figure, axes = plt.subplots(figsize=(6, 3.2))
formula = [theory.bubble("gpipe", 3, m, 1, 1, 1, 1) for m in range(1, 17)]
axes.plot(range(1, 17), formula, color=COLORS["forward"], label="formula (p - 1) / (m + p - 1)")
axes.plot(counts, bubbles, "o", color=COLORS["communication"], label="measured")
axes.set(xlabel="microbatches m, three ranks", ylabel="bubble: idle share", ylim=(0, 1))
axes.legend(frameon=False)
show(
    figure,
    alt="The bubble of GPipe on three ranks falls from 0.67 with one microbatch to 0.11 with sixteen. Measured points "
    "lie on the curve of the formula.",
)

# %% [markdown]
# ## 1F1B: the same time, less memory
#
# Nothing is free. Between its forward and its backward, a microbatch keeps its activations in memory. GPipe does all
# forwards first, so each rank holds all m microbatches. The remedy is to start backwards as early as possible: *one
# forward, one backward* (1F1B).

# %%
from pipeline_parallel.actions import table_text

print(table_text(table_of("1f1b", 3, 6)))

# %% [markdown]
# Read the row of rank 0. It begins with two forwards, F0 and F1, the *warmup*: they are on their way to the ranks behind
# it. Then a forward and a backward follow each other, F2 B0 to F5 B3, the *steady state*. When there are no forwards left,
# the last backwards come, B4 and B5, the *cooldown*. Rank 2 has no warmup: it can begin its first backward after its first
# forward.
#
# **Predict**, for three ranks and six microbatches: GPipe takes (6 + 3 - 1) · 3 = 24 ticks. How many does 1F1B take? And
# how many microbatches does rank 0 hold at most?

# %%
ticks = predict("How many ticks does 1F1B take?", example=20, unit="ticks")
held = predict("How many microbatches does rank 0 hold at most?", example=1)

# %% [markdown]
# The ticks are measured with the metronome, and what a rank holds with real layers: we look which of the tensors that
# autograd saves are in memory at the same time, and divide by what one microbatch needs.

# %%
# %%ranks
one_f_one_b = play("1f1b", 6)
ticks = round(makespan(one_f_one_b) / TICK) if rank == 0 else None

# %%
# %%ranks
from lab.trace.memory import saved_activations


def most_bytes(schedule):
    """Return the most bytes that this rank keeps for its backwards at a time."""
    pipeline = pipeline_of(schedule, microbatches=6)
    with saved_activations(lambda: [features, targets, *pipeline.parameters()]) as held:
        pipeline.step(features, targets)
    return held.peak_bytes


one_microbatch = most_bytes("naive")
held_gpipe, held_1f1b = (round(most_bytes(name) / one_microbatch) for name in ("gpipe", "1f1b"))
held_gpipe, held_1f1b

# %%
ticks.compare(pull("ticks")[0])

# %%
held.compare(pull("held_1f1b")[0])

# %%
figure, axes = plt.subplots(figsize=(6, 3))
for place, (name, color) in enumerate({"gpipe": "forward", "1f1b": "backward"}.items()):
    values = pull(f"held_{name}")
    bars = axes.bar([r + 0.4 * place - 0.2 for r in values], values.values(), 0.38, color=COLORS[color], label=name)
    axes.bar_label(bars)
axes.set(xlabel="rank", ylabel="microbatches held", xticks=range(3), ylim=(0, 8))
axes.legend(frameon=False, ncols=2, loc="upper right")
show(figure, alt="Microbatches held: GPipe holds 6 on each of the three ranks, 1F1B holds 3, 2 and 1.")

# %% [markdown]
# The surprise: 1F1B is *not* faster than GPipe. The staircases at both ends are the same. What it saves is memory: rank r
# holds p - r microbatches instead of m. And that buys time after all: with memory for more microbatches you can make m
# larger, and so the bubble smaller.
#
# ## Unequal stages
#
# So far all stages took equally long. A GPT has an embedding before its blocks and a head behind them, and ten blocks do
# not divide among three ranks. **Predict**: three ranks, six microbatches, and the middle stage takes twice as long as the
# others. With equal stages the step took 24 ticks. How long does it take now? This time we ask the simulator, which
# computes the timeline of a table from the seconds of each stage.

# %%
uneven = predict("How many ticks with a slow stage in the middle?", example=32, unit="ticks")

# %%
slow = simulate(table_of("1f1b", 3, 6), Costs(*[(0.05, 0.1, 0.05)] * 3))
show_events(
    slow.events(),
    alt="Gantt chart of 1F1B with a slow stage in the middle: rank 1 computes without a pause, and ranks 0 and 2 wait "
    "for it between any two actions.",
)
uneven.compare(round(slow.makespan / 0.05))

# %% [markdown]
# Only one stage of three became slower, and the step takes 40 ticks instead of 24: in each round the ranks wait for the
# slowest stage. The same work divided evenly, 4/3 of a tick for each stage, would take
# (6 + 2) · 4 = 32 ticks. So where you cut the model matters more than the schedule.
# [pipeline_parallel/stage.py](../pipeline_parallel/stage.py) cuts by the number of layers or of parameters. For a GPT of
# ten blocks:

# %%
from lab.models.model import GPT, GPTConfig
from pipeline_parallel.stage import costs_of, cut
from lab.models.parts import parts_of

gpt = GPT(GPTConfig.named("tiny", num_layers=10))
parts = parts_of(gpt)
names = ["embedding", *(f"block {i}" for i in range(10)), "head"]
for by in ("layers", "parameters"):
    stages = cut(costs_of(gpt, parts, by), 3)
    print(f"by {by:<12}", " | ".join(f"{names[one.start]} to {names[one.stop - 1]}" for one in stages))

# %% [markdown]
# ## A smaller bubble
#
# Two ideas make the bubble itself smaller, and both change the staircase, not the number of microbatches.
#
# *Interleaving* gives each rank two stages instead of one: with three ranks, rank 0 has stage 0 and stage 3. A stage
# is half as long, so the stairs are half as long. The price is about twice as many messages.
#
# *Zero bubble* looks into the backward. It computes two things: the gradient of the input (I), which the rank before is
# waiting for, and the gradient of the weights (W), for which no rank waits before the optimizer's step. So W can be put off
# until there is nothing better to do. For a linear layer y = x W, and dy the gradient of y, I is dy Wᵀ and W is xᵀ dy: two
# products of the same size, each as long as the forward. **Predict**: three ranks, six microbatches. In 1F1B each rank is
# idle for (3 - 1) · 3 = 6 of 24 ticks. How many are left if W fills the gaps? F, I and W take one tick each.

# %%
idle = predict("For how many ticks is a rank idle?", example=0, unit="ticks")

# %%
# %%ranks
interleaved = play("interleaved", 6)
zero_bubble = play("zb_h1", 6)
idle = round(makespan(zero_bubble) / TICK) - 6 * 3 if rank == 0 else None

# %%
show_events(
    {
        "1F1B": pull("one_f_one_b")[0],
        "interleaved, two stages on each rank": pull("interleaved")[0],
        "ZB-H1: the backward in two halves": pull("zero_bubble")[0],
    },
    alt="Three measured Gantt charts with three ranks and six microbatches. 1F1B has the largest corners of idle time; "
    "interleaving makes them half as long; ZB-H1 fills most of them with weight gradients, drawn in yellow.",
)

# %%
idle.compare(pull("idle")[0])

# %% [markdown]
# Two ticks, a third of 1F1B's bubble. At the beginning nothing can fill the gap: there is no weight gradient yet. At the
# end the W that were put off fill it. To write it, autograd has to be asked for the two halves separately:
# [pipeline_parallel/deferred.py](../pipeline_parallel/deferred.py).
#
# Others go further. ZB-H2 lets rank 0 start more microbatches, and with it the bubble is zero, for about twice the memory.
# [ZB-V](../pipeline_parallel/schedules.py) places two stages on each rank, down the ranks and up again, and needs the memory
# of 1F1B. DualPipe (DeepSeek-V3, 2024) lets microbatches enter from both ends, and hides the messages behind computing.
# And one can search: given the seconds of each action, an integer program finds a good table (Qi et al., 2023, section 3).
# What they change is the order of the same actions, F, I and W. In this lesson such an order is a table, and one loop runs any
# table that is valid.
#
# ## "With pipelines training gets faster"
#
# A course published its reference times for one exercise: 21.3 s for plain model parallelism, and 36.5 s for its pipeline.
# The pipeline was *slower*. Let us try it: once naive with the batch in one piece, once GPipe with 16 microbatches, on a
# model with very little to compute. Here the layers are real, without the metronome.
# **Predict**: the pipeline is how many times as fast? Below 1 means slower. By the formula the naive step takes 3 · 3 ticks,
# and GPipe (16 + 2) · 3 ticks of a sixteenth: 9 against 3.4, so 2.7 times as fast.

# %%
faster = predict("The pipeline is how many times as fast?", example=2.7, unit="times as fast")

# %%
# %%ranks
import time


def seconds_of(schedule, microbatches, tick=None):
    """Return the seconds of the fastest of some steps."""
    pipeline, seconds = pipeline_of(schedule, microbatches, tick), []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(features, targets)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


plain, pipelined = seconds_of("naive", 1), seconds_of("gpipe", 16)

# %%
plain, pipelined = pull("plain")[0], pull("pipelined")[0]
print(f"naive, one piece: {plain * 1e3:.1f} ms a step. GPipe, 16 microbatches: {pipelined * 1e3:.1f} ms a step.")
print("The pipeline is", "slower." if pipelined > plain else "faster.")
faster.compare(plain / pipelined)

# %% [markdown]
# Slower, as in the course. Each forward, backward and message has a fixed cost, here some tenths of a millisecond of Python
# and system calls, on a GPU the launch of kernels. In the pipeline each rank pays it 16 times as often. What is divided by
# 16 is only the time of computing, and in such a small model there is none.
#
# So when does it pay? The metronome can tell. A stage takes from 0.05 to 60 ms for the forward of the full batch, and the
# messages are real.

# %%
# %%ranks
STAGE_MS = [0.05, 0.2, 1, 5, 25, 60]
speedups = []
for ms in STAGE_MS:
    plain = seconds_of("naive", 1, tick=ms / 1e3)
    pipelined = seconds_of("gpipe", 16, tick=ms / 1e3 / 16)
    speedups.append(plain / pipelined)

# %%
stage_ms, speedups = pull("STAGE_MS")[0], pull("speedups")[0]
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(stage_ms, speedups, "o-", color=COLORS["communication"], label="measured")
axes.axhline(1, color="#555555", linewidth=1, linestyle="--", label="as fast as naive")
axes.axhline(48 / 18, color=COLORS["forward"], linewidth=1, label="formula m p / (m + p - 1)")
axes.set(xlabel="ms of a stage's forward, full batch", ylabel="times as fast as naive", xscale="log", ylim=(0, 3))
axes.legend(frameon=False)
show(
    figure,
    alt="GPipe with 16 microbatches beside naive model parallelism on three ranks: far slower for a stage of 0.05 ms, "
    "as fast for a stage of some milliseconds, and near the formula's 2.7 times as fast for a stage of 60 ms.",
)
print(f"with a stage of 60 ms: {speedups[-1]:.2f} times as fast")

# %% [markdown]
# The formula is right for a long stage, and wrong for a tiny one. A pipeline pays when
#
# - a *microbatch* takes much longer on a stage than the fixed cost of an action and a message,
# - there are several times as many microbatches as ranks,
# - and the stages take about equally long.
#
# And compare it with the right thing. If the model fits on one device, data parallelism has no bubble at all. A pipeline is
# for models that do not fit, or for slow links: what it sends is small.
#
# ## It is still the same training
#
# A schedule changes when something is computed, and not what. The check: a small GPT on real text, in 1F1B on three
# ranks and on one process, in float64. Each rank compares the gradients of all its parameters with those of one process.

# %%
# %%ranks
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus

config = GPTConfig.named("tiny", num_layers=6)
x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=8, block_size=config.block_size)

alone = GPT(config).double()
loss_alone = loss_of(alone(x), y)
loss_alone.backward()
expected = {name: parameter.grad for name, parameter in alone.named_parameters()}

pipeline = Pipeline(GPT(config).double(), table_of("1f1b", world_size, 8), loss_of, example=x[:1])
loss = pipeline.step(x, y)
pipeline.finish_gradient_sync()
own = pipeline.named_own_parameters()
errors = [float((own[name].grad - expected[name]).abs().max()) for name in own if name in expected]
print(f"{len(own)} parameters, gradients equal: {max(errors) < 1e-12}")

# %% [markdown]
# `finish_gradient_sync` adds up the gradient of the one parameter that two stages share: the embedding, which is also the
# head.
#
# ## Exercises
#
# Write the schedules yourself, first `pipeline_gpipe`. `check` puts your function in the place of the lesson's, on
# every rank, and runs the lesson's tests. Uncomment the last line when you have filled in the body.

# %%
from exercises.notebook import check
from pipeline_parallel.schedules import _check, _Row


def gpipe(stages, microbatches):
    _check(stages=stages, microbatches=microbatches)
    table = []
    for stage in range(stages):
        row = _Row()
        ...  # row.add("F", stage) adds the next forward, row.add("B", stage) the next backward
        table.append(row.actions)
    return table


# check(gpipe, "pipeline_gpipe");

# %% [markdown]
# Then `pipeline_1f1b` and `pipeline_zb_h1`: the same with `one_f_one_b` and `zb_h1`. In a terminal, `make exercises
# ARGS='hint pipeline_1f1b'` opens a hint.
#
# ## Further reading
#
# - [pipeline_parallel/README.md](../pipeline_parallel/README.md): the lesson, in the order in which to read it; and
#   `.venv/bin/python pipeline_parallel/analysis/page.py --out schedules.html`, a page that plays all schedules
# - Huang et al., "GPipe", 2019, [arXiv:1811.06965](https://arxiv.org/abs/1811.06965); Narayanan et al., 2021,
#   [arXiv:2104.04473](https://arxiv.org/abs/2104.04473) (1F1B and interleaving); Qi et al., "Zero Bubble Pipeline
#   Parallelism", 2023, [arXiv:2401.10241](https://arxiv.org/abs/2401.10241); DeepSeek-AI, "DeepSeek-V3", 2024,
#   [arXiv:2412.19437](https://arxiv.org/abs/2412.19437) (DualPipe)
# - Next: [09 Everything on one mesh](09_everything_on_one_mesh.ipynb)

# %%
# %ranks stop
