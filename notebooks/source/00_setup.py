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
# # 00 Setup
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/00_setup.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** You can train a model on one device. Why is one device not enough, and what do you need in order to
# try several of them on your own laptop?
#
# You need about 40 minutes. Everything in this notebook runs on a machine without a GPU, and nothing is downloaded.
# The cell below starts four *ranks*. A rank is one process of a parallel job. Normally each rank has a device of its
# own, often in another machine. Here all four are processes on your machine, and your processor is their device.
#
# Type your guess whenever a cell asks for one. A guess that turns out wrong is worth more than a fact that you only
# read. If results already stand below the cells, as in Colab, clear all outputs first.

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
# A cell whose first line is `%%ranks` runs on all four ranks at once. The value of its last line is shown for every
# rank. If the ranks had the same value, it would be shown once.

# %%
# %%ranks
f"I am rank {rank} of {world_size}, my device is the {device}"

# %% [markdown]
# If you see an answer of each of the four ranks, the workbook works on your machine. Every rank knows some names
# without an import: `rank`, `world_size`, `device`, `torch`, and `dist`, which is `torch.distributed`. Variables stay
# from cell to cell, and `pull("x")` in an ordinary cell returns the value of `x` on each rank.
#
# ## Why one device is not enough: memory
#
# A common size of a language model is 7 billion parameters. In float32 a parameter is a number of 4 bytes, so the
# weights take 28 GB. A GPU for training has 80 GB. **Predict**: how many GB does the training need for weights,
# gradients and the state of the optimizer Adam together? (This leaves out what the forward keeps for the backward.)

# %%
from lab.notebook.prediction import predict

memory = predict("How many GB do weights, gradients and Adam's state take?", example=28, unit="GB")

# %% [markdown]
# We have no such model here, so we measure a small one: take one step, and count the bytes of all tensors that
# training needs. Divided by the number of parameters, the result holds for a model of any size.

# %%
import torch

from lab.models.model import GPT, GPTConfig, loss_of

model = GPT(GPTConfig.named("small"))
optimizer = torch.optim.Adam(model.parameters())
tokens = torch.zeros(4, 64, dtype=torch.int64)
loss_of(model(tokens), tokens).backward()
optimizer.step()

num_parameters = sum(p.numel() for p in model.parameters())
held = {
    "weights": sum(p.nbytes for p in model.parameters()),
    "gradients": sum(p.grad.nbytes for p in model.parameters()),
    "Adam's state": sum(t.nbytes for of_one in optimizer.state.values() for t in of_one.values()),
}
for name, size in held.items():
    print(f"{name:<13} {size / num_parameters:5.2f} bytes for each parameter")
print(f"{'together':<13} {sum(held.values()) / num_parameters:5.2f}")

# %%
memory.compare(round(sum(held.values()) / num_parameters * 7, 1))

# %% [markdown]
# Each parameter needs 16 bytes: 4 for itself, 4 for its gradient, and 8 because Adam keeps two running averages for it.
# (With weights of 16 bits it is 16 bytes, too. Notebook 06 counts them.) So 7 billion parameters need 112 GB, and no
# GPU of 80 GB can hold them, even before the first *activation*. (Activations are the results of layers that the
# forward keeps for the backward.) The model must be divided among several devices.
#
# ## Why one device is not enough: time
#
# Suppose that memory were no problem. To train a model with N parameters on D tokens takes about 6 N D operations: 2
# for each parameter and token in the forward, and 4 in the backward. A usual number of tokens is 20 for each parameter
# (Hoffmann et al., 2022). **Predict**: how many years would the machine in front of you need for the 7 billion
# parameters? (A laptop does between 50 and 1000 billion operations in a second.)

# %%
years = predict("How many years would this machine need?", example=2, unit="years")

# %%
import time


def operations_per_second(size: int = 1024) -> float:
    a, b = torch.ones(size, size), torch.ones(size, size)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


here = operations_per_second()
needed = 6 * 7e9 * (20 * 7e9)
SECONDS_PER_YEAR = 365 * 24 * 3600
print(f"this machine multiplies matrices with {here / 1e9:.0f} GFLOP/s (billions of operations in a second)")
days = needed / 4e14 / 24 / 3600
print(f"a large GPU, with 4e14 operations in a second: {days:.0f} days")
print(f"a thousand of them, if none waits: {days * 24 / 1000:.1f} hours")
years.compare(needed / here / SECONDS_PER_YEAR)

# %% [markdown]
# A large GPU does about 4e14 operations in a second in such a training, and 170 days are still too long. A thousand of
# them would need four hours, if they did not have to wait for each other. This "if" is what the workbook is about.
#
# ## Throughput against latency
#
# What exactly do more devices make faster? Two words must be kept apart:
#
# - *Latency* is the time from the start of one thing to its end, such as the time of one example's forward and
#   backward.
# - *Throughput* is how many things are done in a second, such as examples or tokens per second.
#
# The next cells process 8 batches. First one rank does all of them, then four ranks do two each. Each batch takes about
# 60 ms of computing. **Predict** both: how many times as fast is a single batch with four ranks, and how many times as
# fast are the eight?

# %%
one_batch = predict("A single batch is how many", example=4, unit="times as fast")

# %%
all_batches = predict("All eight batches are how many", example=4, unit="times as fast")

# %% [markdown]
# Four ranks that compute on a laptop with two cores would disturb each other. So here a clock replaces the computing:
# each layer sleeps for as long as it would compute, as if every rank had a device of its own. We call this model a
# *metronome* ([lab/trace/metronome.py](../lab/trace/metronome.py)). You will meet it wherever a laptop would hide the point.

# %%
# %%ranks
from lab.trace import timeline
from lab.trace.metronome import metronome_of
from lab.models.model import GPT, GPTConfig, loss_of

BATCHES = 8
model = metronome_of(GPT(GPTConfig.named("small")), seconds=0.005)  # 4 layers, 3 * 5 ms each
tokens = torch.zeros(1, 64, dtype=torch.int64)


def train(batches):
    dist.barrier()  # all ranks begin together
    timeline.start_recording()
    for number in batches:
        with timeline.span(f"batch {number}", kind="compute"):
            loss_of(model(tokens), tokens).backward()
    return [event._replace(rank=rank) for event in timeline.recorded()]


alone = train(range(BATCHES) if rank == 0 else [])
together = train(range(rank, BATCHES, world_size))

# %%
import statistics

from lab.notebook.picture import COLORS, show, show_events


def latency(events):
    return statistics.median(event.duration_ns for event in events)


def duration(events):
    return max(event.end_ns for event in events) - min(event.start_ns for event in events)


alone, together = (sum(pull(name).values(), []) for name in ("alone", "together"))
show_events(
    {"one rank": alone, "four ranks": together},
    alt="Two timelines. One rank processes eight batches one after the other. Four ranks process two each at the same "
    "time and end after a quarter of the time, but each single batch is as long as before.",
)

# %%
one_batch.compare(latency(alone) / latency(together))

# %%
all_batches.compare(duration(alone) / duration(together))

# %% [markdown]
# Four ranks have about four times the throughput, and the latency of a batch has not changed at all: look at the
# width of the bars. **A common belief**: "four GPUs are four times as fast". It is about throughput only.
#
# And it is the best case. The ranks only slept, so they did not disturb each other, and nothing was *communicated*. In
# a real training the four ranks must agree on the gradients after each batch, and that takes time.
#
# There are ways to make the latency shorter, too: several ranks work on one batch together, each on a part of each
# layer. Then they must communicate within every layer.
#
# ## How fast is a link?
#
# What connects two devices is called a *link*. Its *latency* is the time that even a tiny message takes, and its
# *bandwidth* is how many bytes it moves in a second. On this machine ranks talk over *loopback*, a network that
# exists only in the operating system's memory. **Predict** its bandwidth. (The disk of a laptop reads about 3 GB/s.)

# %%
bandwidth = predict("How many GB/s does each rank send to the next, all at once?", example=10, unit="GB/s")

# %%
# %%ranks
from comm.point_to_point import measure_link

link = measure_link(large_bytes=32 << 20)  # messages of 4 bytes and of 32 MB around the ring

# %%
link = pull("link")[0]
bandwidth.compare(1e-9 / link.beta)

# %% [markdown]
# The table shows this figure among links of data centres. The others are from data sheets, for one direction. The
# last column is the time in which the gradients of 7 billion parameters, 28 GB, pass once over the link.

# %%
GRADIENTS = 28.0  # GB
LINKS = {  # GB/s in one direction, and a usual latency
    "memory of one H100 GPU": (3350, "below 1 us"),
    "NVLink 4, between GPUs of a machine": (450, "about 2 us"),
    "PCIe 5.0 x16, GPU to processor": (63, "about 2 us"),
    "InfiniBand NDR, 400 Gbit/s": (50, "about 2 us"),
    "PCIe 4.0 x16": (31.5, "about 2 us"),
    "Ethernet, 100 Gbit/s": (12.5, "10 to 50 us"),
    "Ethernet, 25 Gbit/s": (3.1, "10 to 50 us"),
    "Ethernet, 1 Gbit/s": (0.125, "50 to 100 us"),
}
rows = {"loopback, measured here": (1e-9 / link.beta, f"{link.alpha * 1e6:.0f} us"), **LINKS}
print(f"{'link':<37}{'bandwidth':>14} {'latency':<14}{'28 GB take':>11}")
for name, (rate, delay) in rows.items():
    print(f"{name:<37}{rate:>9.4g} GB/s {delay:<14}{GRADIENTS / rate:>9.3g} s")

# %%
import matplotlib.pyplot as plt

ordered = dict(sorted(rows.items(), key=lambda row: row[1][0]))
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
colors = [COLORS["communication" if name.startswith("loopback") else "compute"] for name in ordered]
bars = axes.barh(list(ordered), [rate for rate, _ in ordered.values()], color=colors)
axes.bar_label(bars, [f"{rate:,.4g}" for rate, _ in ordered.values()], padding=3)
axes.set(xscale="log", xlim=(0.05, 30_000), xlabel="GB/s in one direction (each gridline is ten times the one before)")
axes.grid(axis="x", alpha=0.3)
axes.spines[["top", "right"]].set_visible(False)
show(
    figure,
    alt="Bars of bandwidth on a logarithmic scale, from Ethernet at 0.125 GB/s to a GPU's memory at 3350 GB/s. "
    "Loopback, measured on this machine, is in another colour.",
)

# %% [markdown]
# Between the memory of a GPU and plain Ethernet there is a factor of 27,000. That is why it matters so much *who* talks
# to *whom*: a technique that is excellent between GPUs of one machine can be useless between machines. It is also why
# loopback alone would mislead you: it is no link at all. The processor itself copies each byte, on the same few cores
# that compute. So communication takes time away from computing, while a real link carries bytes *beside* the computing,
# and each rank has a link of its own. Where that would hide the point, the workbook simulates a slow link (`--link
# 1gbit,0.2ms`).

# %% [markdown]
# ## Five problems: FLOPs, MFU and the roofline
#
# A *FLOP* is one operation with floating-point numbers. With three numbers, the operations, the bytes, and what a device
# and a link do in a second, you can say in advance how long a training takes and what limits it. Each of these problems is a
# sum on the back of an envelope. Guess first, then let the cell compute it.
#
# **Problem 1. Which share of its peak does this machine reach?** That share is called *MFU*, model FLOPs utilisation: the
# operations that the model needs (6 for each weight and token, and some for attention), divided by the time and by the peak.
# We take the matrix product from above as the peak, with one thread, as each rank has here. **Predict**: how many % of it does a
# training step of the small GPT reach, with layers of 128 numbers, norms, a softmax and an optimizer?

# %%
utilisation = predict("How many % does a training step reach?", example=100, unit="% of the peak")

# %%
threads = torch.get_num_threads()
torch.set_num_threads(1)
tokens = torch.zeros(16, 64, dtype=torch.int64)
seconds = []
for _ in range(8):
    start = time.perf_counter()
    optimizer.zero_grad()
    loss_of(model(tokens), tokens).backward()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
flops = model.config.flops_per_token * tokens.numel()
reached = flops / min(seconds)
print(f"{flops / 1e9:.2f} GFLOP in a step of {tokens.numel()} tokens, so {reached / 1e9:.0f} GFLOP/s")
utilisation.compare(100 * reached / operations_per_second())

# %% [markdown]
# The model's operations are the same on any machine (`flops_per_token` in [lab/models/model.py](../lab/models/model.py)), so MFU
# compares machines, programs and numbers of ranks. Large trainings on GPUs reach 35 to 55 %. What is computed a second time does
# not count. Why does no training reach 100 %?
#
# **Problem 2. When does a device wait for its own memory?** Each operation needs numbers, which come from memory. The operations
# for each byte are the *arithmetic intensity* of a program. To add two vectors reads 8 bytes, writes 4, and computes 1
# operation: 1/12. To multiply two matrices of n x n numbers of 4 bytes moves 3 · 4 n² bytes and computes 2 n³ operations:
# n/6. The *roofline* (Williams et al., 2009) says how fast a program can be: intensity times the memory's bandwidth, and at
# most the peak. **Predict** for an H100, with 989e12 operations in a second (bfloat16, 2 bytes for each number) and 3.35e12
# bytes in a second: from which n on can a product of n x n matrices reach the peak?

# %%
size = predict("From which n on is computing the limit?", example=64)

# %%
size.compare(round(3 * 989e12 / 3.35e12))  # the intensity n/3 must be at least peak / bandwidth

# %% [markdown]
# A number that was read must be used 295 times before the next one. Here is the roofline of your machine, with measured points.
# The first one is the addition, then come products of larger and larger matrices. Norms and activation functions stand where the
# addition stands, and that is why a training does not reach the peak.

# %%
def seconds_of(call):
    times = []
    while sum(times) < 0.05 or len(times) < 10:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


a, b = torch.ones(1 << 23), torch.ones(1 << 23)
out = torch.empty_like(a)
memory_rate = 3 * a.nbytes / seconds_of(lambda: torch.add(a, b, out=out))
points = {1 / 12: a.numel() / (3 * a.nbytes) * memory_rate}
for n in (8, 32, 128, 512, 1024):
    x, y, z = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    points[n / 6] = 2 * n**3 / seconds_of(lambda: torch.mm(x, y, out=z))
peak = max(points.values())
torch.set_num_threads(threads)

intensities = [2**k / 16 for k in range(13)]
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
roof = [min(peak, intensity * memory_rate) / 1e9 for intensity in intensities]
axes.plot(intensities, roof, color=COLORS["wait"], label="roofline")
axes.plot(points.keys(), [rate / 1e9 for rate in points.values()], "o", color=COLORS["compute"], label="measured")
axes.set(xscale="log", yscale="log", xlabel="operations for each byte", ylabel="GFLOP/s")
axes.legend(frameon=False)
show(
    figure,
    alt="A roofline on two logarithmic axes: a line that rises with the operations for each byte, then the level of the "
    "peak. The addition lies at the left end, the largest matrix products on the level part, small products below it.",
)

# %% [markdown]
# (A product of tiny matrices lies below its roof: the call itself takes longer than its arithmetic. And matrices that
# fit in the processor's cache do not need the memory, so they may lie above the line.)
#
# **Problem 3. Is this log good?** A model of 7 billion parameters trains on 64 H100s, and the log says 650,000 tokens/s.
# **Predict** its MFU in %.

# %%
from_log = predict("How many % of the peak?", example=90, unit="%")

# %%
from_log.compare(round(100 * 6 * 7e9 * 650_000 / (64 * 989e12), 1))

# %% [markdown]
# That is a usual figure. 6 · 7e9 operations for a token, times 650,000 tokens, is 2.7e16 in a second, of 6.3e16.
#
# **Problem 4. When does data parallel stop scaling at 1 Gbit/s?** In data parallel each rank computes its part of the batch,
# and then the ranks average their gradients. For this each rank sends almost twice the gradients' bytes, however many ranks
# there are (notebook 03 says why): 2 · 4 N bytes for N parameters. With a batch of B tokens and n ranks of F operations a
# second, computing takes 6 N B / (n F) seconds. **Predict**: B is half a million tokens, F is 1e12 (a laptop's GPU), the link
# carries 125 MB/s. From how many ranks on does a step communicate for longer than it computes?

# %%
limit = predict("From how many ranks on?", example=1000, unit="ranks")

# %%
B, F, LINK = 5e5, 1e12, 125e6
limit.compare(round((6 * B / F) / (2 * 4 / LINK)))  # N is in both times, and cancels

# %% [markdown]
# The size of the model does not matter: a larger one computes more and sends more. The batch matters, and the link. More
# ranks than that still help, but little: no number of ranks is more than 47 times as fast as one. Below, the lines are the
# formula for three links. The points are measured, with a smaller batch, for which the limit at 1 Gbit/s is 6: each rank sleeps
# for its part of the computing, and then all-reduces real gradients over a simulated link of 1 Gbit/s.

# %%
from comm.collectives import all_reduce
from comm.wire import slow_link
from lab.ranks import run_ranks

NUMBERS = 2_000_000  # parameters
COMPUTE = 6 * (2 * 4 * NUMBERS / LINK)  # seconds on one rank


def step(cluster, seconds):
    gradients = torch.zeros(NUMBERS)
    with slow_link.slowed(slow_link.parse("1gbit")):
        start = time.perf_counter()
        time.sleep(seconds / cluster.world_size)
        if cluster.world_size > 1:
            all_reduce(gradients, op="mean", pattern="ring")
        return time.perf_counter() - start


measured = {n: COMPUTE / min(max(run_ranks(step, n, COMPUTE)) for _ in range(3)) for n in (1, 2, 4)}
ranks = [2 ** (k / 4) for k in range(25)]
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
axes.plot(ranks, ranks, ":", color=COLORS["wait"], label="n times as fast")
for (label, faster), color in zip(
    {"25 Gbit/s": 25, "4 Gbit/s": 4, "1 Gbit/s": 1}.items(), ("forward", "backward", "communication"), strict=True
):
    sending = 2 * 4 * NUMBERS / (LINK * faster)
    speed = [COMPUTE / (COMPUTE / n + (n - 1) / n * sending) for n in ranks]
    axes.plot(ranks, speed, color=COLORS[color], label=label)
axes.plot(measured.keys(), measured.values(), "o", color=COLORS["communication"], label="1 Gbit/s, measured")
axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="times as fast as one rank")
axes.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
axes.set_yticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
axes.minorticks_off()
axes.legend(frameon=False)
show(
    figure,
    alt="Speed against the number of ranks. At 25 Gbit/s the line bends late, at 1 Gbit/s it becomes level near six times "
    "the speed of one rank. Three measured points for 1, 2 and 4 ranks lie close to the line of 1 Gbit/s.",
)

# %% [markdown]
# **Problem 5. How large must the batch be?** Turn problem 4 round. Communication should take at most a tenth of the computing,
# on GPUs that do 4e14 operations in a second. **Predict**: how many tokens must *each* GPU have in a step over InfiniBand with
# 400 Gbit/s, which is 50 GB/s?

# %%
batch = predict("How many thousand tokens for each GPU in a step?", example=2, unit="thousand tokens")

# %%
def tokens_needed(bytes_per_second: float) -> float:
    return 10 * (2 * 4 / bytes_per_second) * 4e14 / 6


for name, (rate, _) in list(LINKS.items())[1:]:
    print(f"{name:<37}{tokens_needed(rate * 1e9) / 1000:>10,.0f} thousand tokens for each GPU")
batch.compare(round(tokens_needed(50e9) / 1000))

# %% [markdown]
# Over plain Ethernet no batch is large enough: 43 million tokens for each GPU. That is one reason why gradients are sent in 16
# bits and hidden behind the backward (notebook 05), why tensor parallelism stays inside a machine (notebook 09), and why some
# send less often.
#
# ## The triangle
#
# Every technique of distributed training pays with one of three resources to save another one. Each edge of this
# triangle is a trade:
#
# ```
#                        computing
#                       /         \
#   compute activations/           \exchange gradients less often
#   a second time     /             \(larger batches)
#                    /               \
#              memory ─────────────── communicating
#                divide the weights, and fetch
#                them when they are needed
# ```
#
# (The edge on the right: a large batch exchanges its gradients once, and needs more examples, so more computing, until
# the loss is as low.) Three real runs show the two other edges. Each trains the same small GPT on two ranks for 5
# steps, with the same result. In the first run each rank has all weights and gradients, and half of Adam's state. This
# is stage 1 of *ZeRO*, the Zero Redundancy Optimizer, in short ZeRO 1. In the second a rank has only half of the
# weights and gradients, too (stage 3, ZeRO 3). It fetches the other half of each layer when it needs it. The third also
# forgets the activations of the forward, and computes them a second time in the backward (*recomputation*).
#
# **Predict**: how many times as much does a rank *send* in the second run as in the first, to save a third of the
# memory for weights, gradients and state?

# %%
sent = predict("ZeRO 3 sends how many times the bytes of ZeRO 1?", example=3)

# %%
import json
import os
import subprocess
import sys

from lab.notebook import REPOSITORY

TORCHRUN = [sys.executable, "-m", "lab.launch.torchrun", "--nproc-per-node=2"]  # what `make run` calls


def train_script(script: str, *options: str) -> dict:
    command = [*TORCHRUN, f"zero/{script}", "--steps", "5", "--json", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


runs = {
    "ZeRO 1": train_script("train_zero1.py"),
    "ZeRO 3": train_script("train_zero3.py"),
    "ZeRO 3, recomputation": train_script("train_zero3.py", "--recompute"),
}
STATE = ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes")
for name, run in runs.items():
    run["state"] = sum(run[row] for row in STATE) / 1e6
    run["activations"] = run["activations_bytes"] / 1e6
    run["sent"] = run["bytes_sent"] / run["steps"] / 1e6
    print(f"{name:<22} loss after {run['steps']} steps {run['last_loss']:.4f}")

# %%
sent.compare(round(runs["ZeRO 3"]["sent"] / runs["ZeRO 1"]["sent"], 2))

# %%
forwards = {"ZeRO 1": 3, "ZeRO 3": 3, "ZeRO 3, recomputation": 4}  # a backward is worth two forwards
panels = {
    "computing: forwards": [(forwards, "forwards", "compute")],
    "communicating: MB sent in a step": [({n: r["sent"] for n, r in runs.items()}, "sent", "communication")],
    "memory: MB": [
        ({n: r["state"] for n, r in runs.items()}, "weights, gradients, state", "backward"),
        ({n: r["activations"] for n, r in runs.items()}, "activations", "forward"),
    ],
}
figure, columns = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", sharey=True)
for axes, (title, parts) in zip(columns, panels.items(), strict=True):
    left = dict.fromkeys(runs, 0.0)
    for values, label, kind in parts:
        axes.barh(list(runs), list(values.values()), left=list(left.values()), color=COLORS[kind], label=label)
        left = {name: left[name] + values[name] for name in runs}
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, 1.25 * max(left.values()))
    for row, total in enumerate(left.values()):
        axes.text(total, row, f" {total:.3g}", va="center")
    axes.spines[["top", "right"]].set_visible(False)
columns[0].invert_yaxis()
figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=9)
show(
    figure,
    alt="Three groups of bars. ZeRO 3 sends 4.92 MB in a step instead of 3.34, and holds 33.5 MB instead of 36.9. "
    "With recomputation it computes four forwards instead of three, and holds 9.85 MB.",
)
for name, run in runs.items():
    print(f"{name:<22} sends {run['sent']:.2f} MB, state {run['state']:5.2f} MB, activations {run['activations']:5.2f} MB")

# %% [markdown]
# The three runs have the same loss to the last digit that is shown: the techniques change where numbers are and when
# they travel, not what is computed. ZeRO 3 sends about 1.5 times as many bytes, and a rank holds a third less of
# weights, gradients and state: 6.67 MB instead of 10.01. Recomputation pays with one more forward, and here almost all
# activations disappear. (The number of forwards is the only figure that was not measured: it is counted from the code.)
# Notebook 06 derives all these numbers.
#
# For every technique that you meet from now on, ask which corner pays and which corner gains.
#
# ## The ways in
#
# There are several ways to start ranks. They differ only in who starts the processes and who tells them about each
# other. The lessons are the same files in all of them.
#
# | way | command | good for |
# |---|---|---|
# | a notebook's cell | `%%ranks`, as above, or `run_ranks(fn, world_size=4)` | looking at values |
# | processes on this machine | `make run RUN_MODE=data_parallel_naive WORLD_SIZE=2` | training |
# | the same, or several GPUs | `torchrun --nproc_per_node=2 data_parallel/train_naive.py` | training on a real machine |
# | containers, as if they were machines | `RUN_MODE=data_parallel_naive docker-compose up --build` | networks |
# | by hand, in two terminals | `RANK=0 WORLD_SIZE=2 ... python data_parallel/train_naive.py` | understanding: notebook 01 |
#
# `run_ranks` starts ranks for one function, and returns the result of each. You will find it in the tests and
# benchmarks:

# %%
from lab.ranks import run_ranks


def who(cluster):
    return f"rank {cluster.rank} of {cluster.world_size}"


run_ranks(who, 3)

# %% [markdown]
# The three runs of the triangle were started in the second way: `make run` calls the same launcher, `lab.launch.torchrun`.
#
# ## CPU, CUDA, ROCm
#
# Which devices PyTorch can use is decided when it is installed: there is a build for processors only, one for
# NVIDIA's GPUs (CUDA) and one for AMD's (ROCm). A *backend* is the library that moves tensors between ranks. `gloo`
# moves them between processors, `nccl` between NVIDIA's GPUs. Here is what this machine has:

# %%
import torch.distributed as dist

print(f"a GPU that torch can use: {torch.cuda.is_available()}")
print(f"gloo: {dist.is_gloo_available()}, nccl: {dist.is_nccl_available()}")

# %% [markdown]
# | machine | what to install | backend |
# |---|---|---|
# | a laptop or server without a GPU | `make setup`: it finds the build for processors | `gloo` |
# | Linux with an NVIDIA GPU | `make setup`: the usual build brings CUDA, several GB | `nccl` |
# | Linux with an AMD GPU | `make setup TORCH_INDEX_URL=https://download.pytorch.org/whl/rocmX.Y` | `nccl`, which is RCCL there |
# | macOS | `make setup` | `gloo` |
#
# With ROCm an AMD GPU is called `cuda` in PyTorch, and AMD's library RCCL answers to the name `nccl`. So no lesson has
# to know the difference. A lesson chooses `nccl` where there is a GPU, and `gloo` elsewhere. The environment variable
# `BACKEND=gloo` overrides it: then a machine with GPUs runs the workbook's own message patterns, whose messages can be
# counted.
#
# ## Machines that are containers: docker-compose.yaml
#
# A container is a group of processes with a network interface and a host name of its own. For a rank it looks like a
# machine, and that is what we need. You need no Docker for this notebook. We only read
# [docker-compose.yaml](../docker-compose.yaml), which describes four such machines, node0 to node3. Here is all that
# makes node2 a machine, with a remark beside each entry:

# %%
import yaml

nodes = yaml.safe_load((REPOSITORY / "docker-compose.yaml").read_text())["services"]
REMARKS = {
    "image": "the files and programs: all machines have the same",
    "hostname": "the name by which the other machines find it",
    "networks": "a network of these machines only: no way out, no open port",
    "environment": "settings: what to run, how many ranks, where rank 0 is, ...",
    "cap_drop": "no special rights ...",
    "cap_add": "... but one: it may slow its own link down (LINK=100mbit)",
    "sysctls": "how a sender slows down when the network is full",
    "volumes": "a disk that all machines share, for checkpoints",
    "depends_on": "node0 builds the image, so it comes first",
    "init": "a small first process, so that Ctrl-C ends the rank at once",
    "pull_policy": "the image is in no registry",
}
for key, remark in REMARKS.items():
    value = nodes["node2"].get(key)
    value = f"RANK: {value['RANK']}, and others" if key == "environment" else json.dumps(value)
    print(f"{key + ':':<13} {value:<46} # {remark}")

# %% [markdown]
# **Predict**: in how many entries does the description of node2 differ from that of node1? Count each environment
# variable as an entry.

# %%
differences = predict("How many entries differ between node1 and node2?", example=4)


# %%
def entries(node: dict) -> dict:
    return {key: value for key, value in node.items() if key != "environment"} | node["environment"]


one, two = entries(nodes["node1"]), entries(nodes["node2"])
different = {key: (one[key], two[key]) for key in one if one[key] != two[key]}
print(different)
differences.compare(len(different))

# %% [markdown]
# Two: its name, and its rank. That is the idea of the style which is called *single program, multiple data*: every
# rank runs the same program with the same settings, and decides by its number what its part is. The next cell shows
# the variables by which a rank finds the others. Notebook 01 starts two ranks by hand with nothing else.

# %%
for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    print(f"{variable + '=':<12} {nodes['node2']['environment'][variable]}")

# %% [markdown]
# `${WORLD_SIZE:-4}` means: take the variable of the shell in which you type the command, and 4 if it is not set. So
# the first command starts four machines, and the second two on a slow network:
#
# ```bash
# RUN_MODE=comm docker-compose up --build
# RUN_MODE=comm WORLD_SIZE=2 LINK=100mbit docker-compose up --build
# ```
#
# A notebook can be one of these ranks, too: with `COMPOSE_PROFILES=notebook` JupyterLab takes the place of the last
# machine. [Ways to run a lesson](../docs/running.md#in-containers) says how.
#
# ## Exercises
#
# 1. How many GPUs of 80 GB does a model of 70 billion parameters need at least for its weights, gradients and Adam's
#    state? Change the cell that compares the memory, or do it by hand.
#    <details><summary>Answer</summary>16 bytes for each of 70 billion parameters are 1,120 GB, so 14 GPUs, without
#    any activation.</details>
# 2. In the cell with the metronome, replace `world_size` by 2 in the line of `together`. Predict the picture before
#    you run it.
#    <details><summary>Answer</summary>Ranks 0 and 1 do the even and the odd batches. Ranks 2 and 3 do the even and
#    the odd ones without 0 and 1, so six batches are computed twice: a job that is busy on all ranks and does the
#    work of two.</details>
# 3. Run `make exercises` in a terminal. It shows the first exercise of the workbook, `send_and_receive`, in which
#    all ranks of a ring send at once. Look at the file that it names, and at `make exercises ARGS=hint`. You can solve it after
#    notebook 02. [exercises/README.md](../exercises/README.md) lists all commands.
#
# ## The lesson beside this notebook, and further reading
#
# - [Ways to run a lesson](../docs/running.md), and [what a run tells](../docs/report.md)
# - [entrypoint.sh](../entrypoint.sh): the table from RUN_MODE to the lesson's file
# - Hoffmann et al., [Training Compute-Optimal Large Language Models](https://arxiv.org/abs/2203.15556), 2022: the 20
#   tokens for each parameter
# - Next: [01 Ranks](01_ranks.ipynb)

# %%
# %ranks stop
