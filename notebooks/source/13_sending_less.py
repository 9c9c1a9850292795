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
# # 13 Sending less
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/13_sending_less.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** On a slow network most of a step is sending, and no overlap can hide it. What need not be sent, and what does
# the training lose?
#
# There are three ways out. Send *fewer bits*: compress the gradients. Send *less often*: let each rank train some steps
# alone. Send *less far*: keep most messages within a machine. The first two change what is trained, so a step may teach less.
# Therefore the question at the end is not how long a step takes, but how long it takes to reach a loss.
#
# You need about 40 minutes. The lesson beside this notebook is [low_communication](../low_communication/README.md). You need
# to know `%%ranks` and `predict` from [notebook 02](02_collectives.ipynb), and buckets from
# [notebook 05](05_overlap_and_buckets.ipynb): flat tensors in which several gradients travel together.

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

# %load_ext lab.notebook
# %ranks 4

# %%
import torch

from lab.notebook.prediction import predict

# %% [markdown]
# ## Half the bits
#
# A gradient is a float32 number, with 32 bits. The simplest way to send less is *bf16*: only the upper 16 bits, which are the
# sign, the exponent, and 7 bits of the fraction.
#
# **A common belief**: "half the bits, half the time". Four ranks average 4 MB of gradients on a simulated link of 1 Gbit/s.
# To see the time we need one device for each rank, and your computer may have only a few cores. So computing is replaced by a
# sleep of 40 ms. The messages are real. **Predict**: how many times as long as a step with float32 does a step with bf16
# take?

# %%
half = predict("How many times as long does a step with bf16 take?", example=0.5, unit="times as long")

# %%
# %%ranks
import time

import torch

from comm.wire import slow_link
from low_communication.train_compressed import CompressedDataParallel

COMPUTING = 0.04  # seconds of a step


class Sleeper(torch.nn.Module):
    """Has 4 MB of parameters. Its forward sleeps, and returns a loss."""

    def __init__(self):
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.randn(256, 1024) for _ in range(4))

    def forward(self):
        time.sleep(COMPUTING)
        return sum((matrix**2).mean() for matrix in self.matrices)


def milliseconds(link, compress):
    """Return the time of the fastest of twelve steps on a link."""
    model, found = CompressedDataParallel(Sleeper(), compress), []
    with slow_link.slowed(slow_link.parse(link)):
        for _ in range(12):
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model().backward()
            model.finish_gradient_sync()
            found.append(time.perf_counter() - start)
    return 1000 * min(found)


LINKS = ("200mbit", "1gbit", "10gbit")
times = {link: [milliseconds(link, compress) for compress in ("float32", "bf16", "int8")] for link in LINKS}

# %%
times = pull("times")[0]
print("             float32      bf16      int8")
for link, row in times.items():
    print(f"{link:>7}   " + "".join(f"{found:7.0f} ms" for found in row))
half.compare(times["1gbit"][1] / times["1gbit"][0])

# %% [markdown]
# It is more than half. Half the bits take half the time *on the wire*, and computing takes as long as before:
#
# $$\text{step} = \text{computing} + \frac{2(n-1)}{n} \cdot \frac{\text{bytes of the gradients}}{\text{bytes per second}}$$
#
# With four ranks and 4.2 MB that is 6.3 MB: 252 ms at 200 Mbit/s, 50 ms at 1 Gbit/s, and 5 ms at 10 Gbit/s, beside 40 ms of
# computing. So at 200 Mbit/s the belief is nearly true, and at 10 Gbit/s there is almost nothing to gain. Copying, adding up
# and compressing take time as well, most of all on a few cores. So on a fast link int8 can even take longer.
#
# ## Numbers that cannot be added up
#
# int8 sends a quarter of the bits: a whole number from -127 to 127, the *level*, and one *scale* for each 1,024 levels. A
# number is about level · scale. In a ring all-reduce, ranks add up what arrives and send the sum on. **Predict**: what does a
# rank get for the sum 100 + 100 if all three numbers are int8?

# %%
overflow = predict("What is 100 + 100 in int8?", example=127)

# %%
overflow.compare(torch.tensor(100, dtype=torch.int8) + torch.tensor(100, dtype=torch.int8))

# %% [markdown]
# The sum *overflows*: 200 - 256 = -56. And levels with different scales cannot be added up at all. So int8 makes its
# all-reduce of two other collectives. In an all-to-all each rank gets its chunk of the gradients from all ranks. It adds up
# in float32, makes levels of the result, and an all-gather sends them to all. This is as many messages as a ring has, with a
# quarter of the bytes.
#
# *PowerSGD* sends something else. It writes a matrix of gradients, M, as a product of two thin ones: M ≈ P Qᵀ. P = M Q is
# linear in M: the mean of the ranks' products is the product with the mean of their M. So thin matrices can be added up on
# their way, as gradients can. The product cannot equal M, but a few columns hold much of a gradient. **Predict**: M has 160 ·
# 640 = 102,400 numbers, and P and Q have 4 columns each. How many numbers travel in place of M?

# %%
thin = predict("How many numbers do P and Q have?", example=640, unit="numbers")

# %%
M = torch.randn(160, 640)
Q = torch.randn(640, 4)
P = M @ Q
thin.compare(P.numel() + Q.numel())

# %% [markdown]
# 4 (160 + 640), one in 32. *Top-k* is the third idea: send only the largest numbers, here 1 in 100, and their places. Here
# are all of them on the gradients of a small GPT, on four ranks. The error is the distance between the compressed mean and
# the exact mean, divided by the size of the exact mean.

# %%
# %%ranks
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus, rank_slice, split
from low_communication.compressors import COMPRESSORS

text, held_out = split(load_corpus())
model = GPT(GPTConfig.named("small"))
x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, 0, 0, 16, 64))
loss_of(model(x), y).backward()
shapes = [p.shape for p in model.parameters()]
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])

means, sent = {}, {}
for name, Compressor in COMPRESSORS.items():
    compressor, means[name] = Compressor(shapes), gradient.clone()
    compressor.mean(means[name])  # replaces this rank's gradients by about the mean over ranks
    sent[name] = compressor.traffic().bytes_sent
exact = means["float32"]
errors = {name: ((mean - exact).norm() / exact.norm()).item() for name, mean in means.items()}

# %%
print("            bytes sent   error")
for name, error in pull("errors")[0].items():
    share = pull("sent")[0][name] / pull("sent")[0]["float32"]
    print(f"{name:<10} {share:10.3f} {error:8.1f}")

# %% [markdown]
# bf16 and int8 change the gradients so little that one digit does not show it. Top-k and PowerSGD send about a twentieth of
# the bytes, and what they leave out shows. It need not be lost.
#
# ## Error feedback
#
# A rank keeps what it has not sent, and adds it to its gradient in the next step. This is *error feedback*:
#
# $$\text{sent} + \text{what remains} = \text{gradient} + \text{what remained before}$$
#
# A small example: in each of ten steps the gradient is 0.3, and a step can send whole numbers only. Each 0.3 is rounded to 0,
# so without error feedback the sum of all that is sent is 0. **Predict**: what is it with error feedback?

# %%
whole = predict("What is the sum of what is sent in ten steps?", example=0)

# %%
remaining, sent = 0.0, []
for _ in range(10):
    wanted = 0.3 + remaining
    sent.append(round(wanted))
    remaining = wanted - sent[-1]
print("sent:", sent)
whole.compare(sum(sent))

# %% [markdown]
# The sum is right, 10 · 0.3, and only comes a little later. Now the same with top-k and the gradients from above. They stay
# the same for 20 steps, as if the parameters did not move. How many of the places does a rank ever send?

# %%
# %%ranks
def places_sent(error_feedback):
    """Return the share of places that this rank has sent in 20 steps, and if nothing was lost."""
    compressor = COMPRESSORS["topk"](shapes, share=0.01)
    remaining, total = torch.zeros_like(gradient), torch.zeros_like(gradient)
    for _ in range(20):
        wanted = gradient + remaining
        sent = compressor.mean(wanted.clone())
        total += sent
        if error_feedback:
            remaining = wanted - sent
    is_complete = (total + remaining - 20 * gradient).abs().max() < 1e-4 * gradient.abs().max()
    return f"{100 * (total != 0).double().mean():.0f}% of the places, nothing lost: {is_complete.item()}"


shares = {"without": places_sent(False), "with": places_sent(True)}

# %%
for how, result in pull("shares")[0].items():
    print(f"{how:<8} error feedback: {result}")

# %% [markdown]
# Without error feedback the same 1% is sent again and again. With it, small gradients add up until they are among the
# largest.
#
# Theory says that SGD with error feedback converges, whatever a compressor leaves out (Karimireddy et al., 2019). But almost
# everybody trains with AdamW. **A common belief**: "error feedback rescues top-k". A tiny GPT trains for 200 steps on text,
# on four ranks with AdamW. The first run sends float32, the second one the top 1% without error feedback.

# %%
# %%ranks
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.trace.ledger import LEDGER
from low_communication.train_diloco import DiLoCo
from low_communication.train_local_sgd import LocalSGD

STEPS, BATCH, LENGTH = 200, 4, 32  # one window of text on each rank
places = torch.arange(256)[:, None] * (len(held_out) // 257) + torch.arange(LENGTH + 1)
held_out = held_out[places].long()


def train(wrap, **options):
    """Return the curve of a training: (step, loss on held-out text, bytes that this rank has sent) on rank 0."""
    model = GPT(GPTConfig.named("tiny"))
    parallel = wrap(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    every = options.get("sync_every", 10)
    before, curve = LEDGER.total().bytes_sent, []
    for step in range(1, STEPS + 1):
        x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, 0, step - 1, BATCH, LENGTH))
        optimizer.zero_grad()
        loss_of(parallel(x), y).backward()
        if isinstance(parallel, BucketDataParallel):  # as CompressedDataParallel is
            parallel.finish_gradient_sync()
        optimizer.step()
        if isinstance(parallel, LocalSGD):
            averaged = parallel.after_step(optimizer)
            if step == STEPS and not averaged:
                parallel.average(optimizer)
        if isinstance(parallel, DiLoCo):
            parallel.after_step()
            if step == STEPS:
                parallel.finish()
        if rank == 0 and (step % every == 0 or step == STEPS):
            with torch.no_grad():
                loss = loss_of(model(held_out[:, :-1]), held_out[:, 1:]).item()
            curve.append((step, loss, LEDGER.total().bytes_sent - before))
    return curve


curves = {"float32": train(BucketDataParallel)}
curves["top 1%, no feedback"] = train(CompressedDataParallel, compress="topk", error_feedback=False)

# %%
def show_losses(*names):
    curves = pull("curves", [0])[0]
    for name in names:
        losses = {step: f"{loss:.2f} nats" for step, loss, _ in curves[name] if step in (50, 100, 150, 200)}
        print(f"{name:<20} " + ", ".join(f"step {step}: {loss}" for step, loss in losses.items()))


def nats_behind(name):
    """Return how much larger the last loss is than that of float32."""
    curves = pull("curves", [0])[0]
    return curves[name][-1][1] - curves["float32"][-1][1]


show_losses("float32", "top 1%, no feedback")

# %% [markdown]
# (The loss is in nats. Before the first step it is ln 256 = 5.5: each of 256 bytes is as likely as the others.) After 200
# steps top-k without feedback is 0.17 nats behind float32. **Predict**: how many nats behind is top-k with error feedback?

# %%
rescued = predict("How many nats behind float32 is top-k with feedback?", example=0.02, unit="nats")

# %%
# %%ranks
curves["top 1%, feedback"] = train(CompressedDataParallel, compress="topk")

# %%
show_losses("float32", "top 1%, no feedback", "top 1%, feedback")
rescued.compare(nats_behind("top 1%, feedback"))

# %% [markdown]
# It is not rescued here. With feedback and without it top-k ends at about the same loss, and float32 had a smaller one after
# half of the steps. One reason is AdamW. It divides each number by its usual size. So a gradient that has added up for 50
# steps moves its parameter hardly further than one of a single step, and it comes late. The other compressors do better.
# int8, with a scale for each 1,024 numbers, leaves out so little that it does not even need feedback:

# %%
# %%ranks
curves["int8, no feedback"] = train(CompressedDataParallel, compress="int8", error_feedback=False)
curves["int8"] = train(CompressedDataParallel, compress="int8")
curves["PowerSGD"] = train(CompressedDataParallel, compress="powersgd")

# %%
show_losses("float32", "int8, no feedback", "int8", "PowerSGD")

# %% [markdown]
# ## Less often
#
# Each rank trains H steps alone, and then the ranks average their *parameters*. This is *local SGD*. In H steps a rank sends
# what data parallelism sends in one.
#
# **A common belief**: "averaging parameters is averaging gradients". Let us see with one parameter, w = 64. On ranks 0 and 1
# the loss is w²/2, so a step of SGD with learning rate 0.5 halves w. On ranks 2 and 3 it is w²/4, and a step makes 3/4 of w.
# After one step of data parallelism w is 40, and after two 25: each step multiplies it by the mean, 5/8. **Predict**: what is
# w if each rank takes two steps alone (H = 2), and then the parameters are averaged?

# %%
averaged = predict("What is w after two steps with H = 2?", example=25)

# %%
# %%ranks
def train_w(wrap, **options):
    """Take two steps from w = 64; return w."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 64.0)
    parallel = wrap(layer, **options)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        w = parallel(torch.ones(1))
        (w**2 * [1 / 2, 1 / 2, 1 / 4, 1 / 4][rank]).sum().backward()
        if isinstance(parallel, BucketDataParallel):
            parallel.finish_gradient_sync()
        optimizer.step()
        if isinstance(parallel, LocalSGD):
            parallel.after_step(optimizer)
    return layer.weight.item()


w = {
    "data parallel": train_w(BucketDataParallel),
    "H = 1": train_w(LocalSGD, sync_every=1),
    "H = 2": train_w(LocalSGD, sync_every=2),
}

# %%
for name, value in pull("w")[0].items():
    print(f"{name:<14} w = {value:g}")
averaged.compare(pull("w")[0]["H = 2"])

# %% [markdown]
# After one step alone, ranks 0 and 1 are at 32 and ranks 2 and 3 at 48. The mean is 40, as with averaged gradients. In the
# second step a rank computes its gradient where only its own first step has led: 16 and 36, and the mean is 26. So for *one*
# step of plain SGD the belief is true, because such a step is linear in the gradient. It is false for more steps. Is it true
# for AdamW and one step?

# %%
# %%ranks
def parameters_after(wrap, optimizer_class, **options):
    """Return all parameters of a GPT after four steps, in float64."""
    model = GPT(GPTConfig.named("tiny")).double()
    parallel = wrap(model, **options)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    for step in range(4):
        x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, 0, step, 8, LENGTH))
        optimizer.zero_grad()
        loss_of(parallel(x), y).backward()
        if isinstance(parallel, BucketDataParallel):
            parallel.finish_gradient_sync()
        optimizer.step()
        if isinstance(parallel, LocalSGD):
            parallel.after_step(optimizer)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


equal = {}
for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
    right = parameters_after(BucketDataParallel, optimizer_class)
    for H in (1, 4):
        ours = parameters_after(LocalSGD, optimizer_class, sync_every=H)
        equal[f"{optimizer_class.__name__}, H = {H}"] = ((ours - right).abs().max() < 1e-12).item()

# %%
for name, is_equal in pull("equal")[0].items():
    print(f"{name:<12} equals data parallelism: {is_equal}")

# %% [markdown]
# Only SGD with H = 1 does. AdamW divides each rank's gradient by that rank's own average size, which is not linear. So with
# AdamW even H = 1 is another training. (The averages of AdamW stay on their rank. To average them, too, would send three
# times as much.)
#
# ## One synchronisation in 100 steps
#
# Another training need not be a worse one. **A common belief**: "at one synchronisation in 100 steps the loss must suffer".
# It is the same tiny GPT, and in 200 steps the ranks average twice. With float32 gradients in each step the loss above was
# 2.84 after 100 steps and 2.69 after 200. **Predict**: how many nats behind that is H = 100 after 200 steps?

# %%
rarely = predict("How many nats behind float32 is H = 100?", example=1, unit="nats")

# %%
# %%ranks
for H in (1, 8, 32, 100):
    curves[f"H = {H}"] = train(LocalSGD, sync_every=H)
curves["alone"] = train(lambda model: model)

# %%
def show_ends(*names):
    for name in names:
        _, loss, sent = pull("curves", [0])[0][name][-1]
        print(f"{name:<10} {loss:.2f} nats, {sent / 1e6:5.2f} MB sent")


show_ends("float32", "H = 1", "H = 8", "H = 32", "H = 100", "alone")
rarely.compare(nats_behind("H = 100"))

# %% [markdown]
# At equal steps the loss suffers a little: float32 had the loss of H = 100 some 70 steps earlier. But H = 100 has sent a
# hundredth of the bytes. About half of the distance is there with H = 1 already, where only AdamW's averages differ. From
# H = 8 to H = 100 the loss grows by a few hundredths. And the two averages are worth something: a rank that trains *alone*
# sees its own quarter of the text only, and ends with a larger loss. So the belief is half true. This is a tiny model in its
# first steps, so measure H for your own.
#
# *DiLoCo* (Douillard et al., 2023) averages the same bytes, and does more with them. It takes the mean change of the
# parameters in H steps for a gradient, and gives it to a second, *outer* optimizer: SGD with Nesterov momentum, which
# remembers in which direction the last rounds went.

# %%
# %%ranks
curves["DiLoCo 32"] = train(DiLoCo, sync_every=32)

# %%
show_ends("float32", "H = 32", "DiLoCo 32")

# %% [markdown]
# Here it is no better than the plain average. The paper has its gain in trainings that are much longer, of much larger
# models. At the scale of a laptop we have seen none.
#
# ## Loss against seconds
#
# Now the question of the beginning: how long does each way take to a loss? All of them are here, against the bytes that a
# rank has sent, and against the time at 200 Mbit/s. The time is by the formula of the first section. We let a step of this
# tiny GPT compute for 2 ms.

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

COMPUTING = 0.002  # seconds of a step
curves = pull("curves", [0])[0]
names = ("float32", "int8", "PowerSGD", "top 1%, feedback", "H = 8", "H = 100", "DiLoCo 32")


def seconds(steps, sent, megabits):
    return steps * COMPUTING + sent * 8 / (megabits * 1e6)


figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
for name, color in zip(names, COLORS.values()):
    steps, losses, sent = zip(*curves[name])
    along = steps, [sent_bytes / 1e6 for sent_bytes in sent], [seconds(*one, 200) for one in zip(steps, sent)]
    for panel, x in zip(axes, along):
        panel.plot(x, losses, color=color, label=name, marker="o" if len(x) < 10 else None, markersize=3)
for panel, name in zip(axes, ("steps", "MB that a rank has sent", "seconds at 200 Mbit/s")):
    panel.set_xlabel(name)
axes[0].set_ylabel("loss on held-out text")
axes[1].set_xscale("log")
axes[2].legend(fontsize=7)
show(
    figure,
    alt="Loss against steps, bytes and seconds. Against steps float32 is the lowest line. Against bytes and against seconds at "
    "200 Mbit/s it is far behind int8, PowerSGD, and the ranks that average every 8, 32 or 100 steps.",
)

# %% [markdown]
# Against *steps*, in the left panel, float32 is best. int8 and PowerSGD are close behind it, and the others learn less in a
# step. Against bytes float32 is the worst. The table below has the time until a training first has the loss that float32 has
# after 100 steps, on three links. **Predict**: at 200 Mbit/s, how many times as long as float32 does H = 100 take? On each
# link a step computes for 2 ms, and sending the gradients in float32 takes 8.3 ms, 1.7 ms or 0.2 ms.

# %%
faster = predict("How many times as long does H = 100 take?", example=0.01, unit="times as long")

# %%
goal_step, goal, goal_sent = next(point for point in curves["float32"] if point[0] == 100)
links = (200, 1000, 10_000)  # Mbit/s
print(" " * 18 + "".join(f"{link:>12,} Mbit/s" for link in links))
ratios = {}
for name in names:
    reached = [(step, sent) for step, loss, sent in curves[name] if loss <= goal]
    if not reached:
        print(f"{name:<18}      never")
        continue
    ratios[name] = [seconds(*reached[0], link) / seconds(goal_step, goal_sent, link) for link in links]
    print(f"{name:<18}" + "".join(f"{ratio:5.2f} times as long" for ratio in ratios[name]))

# %%
faster.compare(ratios["H = 100"][0])

# %% [markdown]
# At 200 Mbit/s a step with float32 is four fifths sending. All that reach the loss do it in less than half of the time,
# although most need more steps. At 1 Gbit/s int8, PowerSGD and H = 8 still gain something, and H = 100 needs too many steps.
# At 10 Gbit/s sending is less than a tenth of a step: there is nothing to gain, and each further step costs. In one formula:
#
# $$\text{it pays if} \quad \frac{\text{its steps}}{\text{steps of float32}} < \frac{\text{time of a step of float32}}{\text{time of its step}}$$
#
# The formula of this notebook leaves out two things, the time to compress and the overlap with the backward.
# `python benchmarks/sending_less.py` measures the same table with both, for a larger model.
#
# ## Less far
#
# The third way leaves the training as it is. Often several GPUs are in one machine, with fast links, and only the network
# between machines is slow. ZeRO 3 ([notebook 06](06_zero_and_fsdp.ipynb)) divides everything among all ranks, so its gathers
# of parameters cross the network. *Hybrid sharding* divides it among the ranks of a machine, and each machine has a full
# copy. Parameters are gathered within the machine. Over the network goes an all-reduce of gradients: each rank averages those
# of its shard with the rank of the other machine that has the same shard.
#
# Let ranks 0 and 1 be one machine and ranks 2 and 3 another one. In ZeRO 3's ring of four ranks, rank 1 is the last one of
# its machine: all that it sends goes to rank 2, on the other machine. **Predict**: how many times as many bytes leave the
# machine with ZeRO 3 as with hybrid sharding?

# %%
leaving = predict("How many times as many bytes leave a machine with ZeRO 3?", example=1, unit="times")

# %%
# %%ranks
from comm.wire.groups import own_group
from low_communication.train_hsdp import HybridShardedDataParallel
from zero.train_zero3 import FullyShardedDataParallel

shard_group = own_group([[0, 1], [2, 3]], "shards")
replicas = own_group([[0, 2], [1, 3]], "replicas")


def bytes_of_step(wrap, *groups):
    """Return the bytes that this rank sends in a step, by the name of the group in which they travel."""
    model = wrap(GPT(GPTConfig.named("small")), *groups)
    LEDGER.clear()
    x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, 0, 0, 4, 64))
    loss_of(model(x), y).backward()
    model.finish_gradient_sync()
    rows = [(entry.axis, traffic.bytes_sent) for entry, traffic in LEDGER.rows().items()]
    return {name: sum(sent for axis, sent in rows if axis == name) for name in ("", "shards", "replicas")}


zero3 = bytes_of_step(FullyShardedDataParallel)
hybrid = bytes_of_step(HybridShardedDataParallel, shard_group, replicas)

# %%
zero3, hybrid = pull("zero3"), pull("hybrid")
leaves_zero3 = zero3[1][""]
leaves_hybrid = hybrid[0]["replicas"] + hybrid[1]["replicas"]
print(f"ZeRO 3: {leaves_zero3 / 1e6:.1f} MB leave the machine, hybrid sharding: {leaves_hybrid / 1e6:.1f} MB")
leaving.compare(leaves_zero3 / leaves_hybrid)

# %% [markdown]
# Twice as many. In general ZeRO 3 sends about 3 (n-1)/n times the bytes of all parameters, P, out of a machine: two gathers
# of parameters and one reduce-scatter of gradients (a little less here, because the last block and the root stay full between
# forward and backward). With hybrid sharding on k machines it is 2 (k-1)/k P, and P on two machines. With microbatches ZeRO 3
# sends all of it again for each, and hybrid sharding still once in a step. The price is memory: parameters, gradients and
# optimizer state are divided among the ranks of one machine only.
#
# The three ways can be combined. Between machines an all-reduce of shards can be compressed, too, or come every H steps.
#
# ## Exercises
#
# The checker puts your functions in the place of the lesson's, on every rank, and runs the lesson's tests.
# `make exercises ARGS='watch local_sgd_average'` makes the first file, and grades it on each save.
#
# 1. `local_sgd_average`: average the parameters every H steps.
# 2. `int8_scale`: turn numbers into levels and scales, and back.
# 3. `error_feedback`: keep what was not sent, and send it later.
#
# ## Further reading
#
# - [low_communication/README.md](../low_communication/README.md): the lesson, with fragments that travel while the training goes on, and the time to a
#   loss of a larger model, measured
# - Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, [arXiv:1805.09767](https://arxiv.org/abs/1805.09767)
# - Douillard et al., "DiLoCo", 2023, [arXiv:2311.08105](https://arxiv.org/abs/2311.08105)
# - Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, [arXiv:1901.09847](https://arxiv.org/abs/1901.09847)
# - Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, [arXiv:1905.13727](https://arxiv.org/abs/1905.13727)
# - Zhao et al., "PyTorch FSDP", VLDB 2023, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277): hybrid sharding

# %%
# %ranks stop
