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
# alone. Send *less far*: keep most messages within a machine. The first two change the updates, so a step may teach less.
# Therefore the question at the end is not how long a step takes, but how long it takes to reach a given loss.
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
# Each number of a gradient is a float32, 32 bits. The simplest way to send less is *bf16*: only the upper 16 bits, which are
# the sign, the exponent, and 7 bits of the fraction.
#
# **A common belief**: "half the bits, half the time". Four ranks average 4.2 MB of gradients. To see the time we need one
# device for each rank, and your computer may have only a few cores. So computing is replaced by a sleep of 40 ms. The messages
# are real. The sleep is in the forward, so nothing is sent meanwhile: the time of a step is a sum. The first part of it is the
# sleep. The second is the method's own work, which is to compress, copy, pass on and add up. Here it is, measured without a
# slow link:

# %%
# %%ranks
import time

import torch

from comm.wire import slow_link
from low_communication.train_compressed import CompressedDataParallel


class Sleeper(torch.nn.Module):
    """Has parameters of these shapes. Its forward sleeps for some seconds, and returns a loss."""

    def __init__(self, shapes, seconds):
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.seconds = seconds

    def forward(self):
        time.sleep(self.seconds)
        return sum((tensor**2).mean() for tensor in self.tensors)


def milliseconds(compress, shapes, seconds, link=None, steps=12):
    """Return the time of the fastest of some steps on a link."""
    model, found = CompressedDataParallel(Sleeper(shapes, seconds), compress), []
    with slow_link.slowed(link and slow_link.parse(link)):
        for _ in range(steps):
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model().backward()
            model.finish_gradient_sync()
            found.append(time.perf_counter() - start)
    return 1000 * min(found)


FOUR_MB = [(256, 1024)] * 4
SHARES = {"float32": 1, "bf16": 1 / 2, "int8": 1 / 4}  # of the bits
own = {compress: milliseconds(compress, FOUR_MB, 0.04, steps=40) - 40 for compress in SHARES}

# %%
for compress, its_own in pull("own")[0].items():
    print(f"own work of {compress:<7} {its_own:4.0f} ms")

# %% [markdown]
# The third part is the time on the wire. A rank sends 3/2 of the bytes ([notebook 03](03_cost_of_a_message.ipynb): 2 (n-1)/n
# with n = 4), so with float32 it takes 50 ms at 1 Gbit/s. **Predict**: how many times as long as a step with float32 does a
# step with bf16 take there?

# %%
half = predict("How many times as long does a step with bf16 take?", example=0.5, unit="times as long")

# %%
# %%ranks
times = {
    link: {compress: milliseconds(compress, FOUR_MB, 0.04, link) for compress in SHARES}
    for link in ("200mbit", "1gbit", "10gbit")
}

# %%
own, times = pull("own")[0], pull("times")[0]
wire = {"200mbit": 252, "1gbit": 50, "10gbit": 5}  # ms for 6.3 MB in float32
print(" " * 8 + "".join(f"{name + ': the sum, measured':>32}" for name in own))
for link, row in times.items():
    sums = {name: 40 + own[name] + share * wire[link] for name, share in pull("SHARES")[0].items()}
    print(f"{link:<8}" + "".join(f"{sums[name]:20.0f} ms, {found:4.0f} ms" for name, found in row.items()))
half.compare(times["1gbit"]["bf16"] / times["1gbit"]["float32"])

# %% [markdown]
# It is more than half. Half the bits take half the time *on the wire* only:
#
# $$\text{step} = \text{computing} + \text{own work} + \frac{2(n-1)}{n} \cdot \frac{\text{bytes of the gradients}}{\text{bytes per second}}$$
#
# At 200 Mbit/s the last part is most of the step, and the belief is nearly true. At 10 Gbit/s there is nothing to gain. int8
# has the most work of its own, so on a fast link it takes longer than float32. (The sum can be too large, since a slow link
# hides a part of the own work. Four ranks share your few cores. On a GPU of its own a rank compresses much faster.)
#
# ## Numbers that cannot be added up
#
# int8 sends a quarter of the bits. A block of 1,024 numbers has one *scale*, its largest absolute value / 127. Each number is
# sent as a *level*, number / scale, rounded: a whole number from -127 to 127. In a ring all-reduce, ranks add up what arrives
# and send the sum on. In int8 the sum *overflows*: 100 + 100 is 200 - 256 = -56. And levels with different scales cannot be
# added up at all. So int8 makes its all-reduce of two other collectives. In an all-to-all each rank gets its chunk of the
# gradients from all ranks. It adds up in float32, makes levels of the result, and an all-gather sends them to all. This is as
# many messages as a ring has, with a quarter of the bytes.
#
# *Top-k* sends only the largest numbers of each rank, here 1 in 100, and their places. The ranks choose different places, so
# each rank gathers those of all others: 8 (n-1) bytes for each number that is kept, 4 for the number and 4 for its place. A ring
# all-reduce sends 8 (n-1)/n bytes for each number. So the share of the bytes is n times the share of the numbers, and with 100
# ranks nothing is saved.
#
# *PowerSGD* sends something that can be added up. It writes a matrix of gradients, M, as a product of two thin ones, P Qᵀ. All
# ranks begin with the same Q. M Q is linear in M: the mean of the ranks' products is the product with the mean of their M. So
# P = M Q can be added up on its way. Its columns are made orthonormal, and then the same is done with Q = Mᵀ P. Only P and Q
# travel. The next step begins with the Q of this one.
#
# That is good if a few directions hold much of M, which its *singular values* say: the sum of their squares is the squared norm
# of M, and P Qᵀ with 4 columns can hold at most the 4 largest. Here M is the gradient of a layer of a small GPT, 512 x 128, so
# P and Q have one number for 26 of M. **Predict**: of the mean of M over the ranks, what share of the squared norm do the 4
# largest of its 128 singular values hold?

# %%
largest = predict("What share do 4 of 128 singular values hold?", example=4 / 128)

# %%
# %%ranks
from comm.collectives import all_reduce
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus, rank_slice, split
from low_communication.compressors import COMPRESSORS

text, held_out = split(load_corpus())
model = GPT(GPTConfig.named("small"))
x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, 0, 0, 16, 64))
loss_of(model(x), y).backward()


def mean_of_ranks(tensor):
    tensor = tensor.clone()
    all_reduce(tensor, "mean")
    return tensor


M = model.blocks[0].mlp.up_proj.weight.grad
exact = mean_of_ranks(M)
squares = torch.linalg.svdvals(exact) ** 2
share = (squares[:4].sum() / squares.sum()).item()

Q = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))  # the same on all ranks
errors = []
for _ in range(3):  # three steps, as if the gradient stayed the same
    P = mean_of_ranks(M @ Q)  # travels
    P = torch.linalg.qr(P).Q  # orthonormal columns
    Q = mean_of_ranks(M.T @ P)  # travels
    errors.append(((P @ Q.T - exact).norm() / exact.norm()).item())

# %%
print("error of three steps:", ", ".join(f"{error:.2f}" for error in pull("errors")[0]))
print(f"the least that 4 columns allow: {(1 - pull('share')[0]) ** 0.5:.2f}")
largest.compare(round(pull("share")[0], 2))

# %% [markdown]
# The error is the norm of (P Qᵀ - exact mean), divided by the norm of the exact mean. After two steps it is near the least.
# Here is the error of all compressors, on all gradients of this GPT:

# %%
# %%ranks
shapes = [p.shape for p in model.parameters()]
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
exact, errors, sent = mean_of_ranks(gradient), {}, {}
for name, Compressor in COMPRESSORS.items():
    compressor, mean = Compressor(shapes), gradient.clone()
    compressor.mean(mean)  # replaces this rank's gradients by about the mean over ranks
    errors[name] = ((mean - exact).norm() / exact.norm()).item()
    sent[name] = compressor.traffic().bytes_sent

# %%
print("            bytes sent    error")
for name, error in pull("errors")[0].items():
    share = pull("sent")[0][name] / pull("sent")[0]["float32"]
    print(f"{name:<10} {share:10.3f} {error:#9.2g}")

# %% [markdown]
# bf16 and int8 hardly change the gradients. Top-k and PowerSGD send about a twentieth of the bytes, and leave out much in one
# step. It need not be lost. (PowerSGD sends vectors as they are, and other matrices are smaller than M. In the tiny GPT below
# all are so small that it sends a fifth.)
#
# ## Error feedback
#
# A rank keeps what it has not sent, and adds it to its gradient in the next step. This is *error feedback*:
#
# $$\text{sent} + \text{what remains} = \text{gradient} + \text{what remained before}$$
#
# If the gradient is 0.3 in each of ten steps, and only whole numbers can be sent, then 0 is sent each time. With error feedback
# 1 is sent in three of the steps: the sum is right, and a little late. Now top-k, with the gradients from above. They stay the
# same for 20 steps, as if the parameters did not move, and a rank sends 1% of the places in a step. Without error feedback
# these are the same places each time. **Predict**: how many percent of the places has it sent after 20 steps with error
# feedback?

# %%
places = predict("How many percent of the places has a rank sent?", example=20, unit="%")

# %%
# %%ranks
compressor = COMPRESSORS["topk"](shapes, share=0.01)
remaining, total = torch.zeros_like(gradient), torch.zeros_like(gradient)
for _ in range(20):
    wanted = gradient + remaining
    sent = compressor.mean(wanted.clone())  # returns what this rank itself has sent
    remaining = wanted - sent
    total += sent
places_sent = 100 * (total != 0).double().mean().item()
missing = 100 * (remaining.norm() / (20 * gradient).norm()).item()

# %%
print(f"{pull('missing')[0]:.0f}% of the norm of 20 gradients has not been sent")
places.compare(round(pull("places_sent")[0]))

# %% [markdown]
# Not 20%, because places come again: a gradient that is five times as large as another one is sent five times as often. What
# waits in small gradients is not lost, but it is late: after 20 steps more than a third of the norm remains.
#
# Theory says that SGD with error feedback converges if each step sends at least a fixed share of the squared norm
# (Karimireddy et al., 2019). But almost everybody trains with AdamW. **A common belief**: "error feedback rescues top-k". A
# tiny GPT trains for 200 steps on text, on four ranks with AdamW. All ranks and all trainings start with the same weights,
# since GPT draws them with a fixed seed. The first training sends float32, the second one the top 1% without error feedback.

# %%
# %%ranks
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.trace.ledger import LEDGER
from low_communication.train_diloco import DiLoCo
from low_communication.train_local_sgd import LocalSGD

BATCH, LENGTH = 4, 32  # one window of text on each rank
starts = torch.arange(256)[:, None] * (len(held_out) // 257)
windows = held_out[starts + torch.arange(LENGTH + 1)].long()


def end_step(parallel, optimizer):
    """Do what follows a backward: average gradients before the optimizer's step, or parameters after it."""
    if isinstance(parallel, BucketDataParallel):  # as CompressedDataParallel is
        parallel.finish_gradient_sync()
    optimizer.step()
    if isinstance(parallel, LocalSGD):
        parallel.after_step(optimizer)  # averages if H steps are over
    if isinstance(parallel, DiLoCo):
        parallel.after_step()
    optimizer.zero_grad()


def train(wrap, steps=200, seed=0, **options):
    """Return the curve of a training: (step, loss on held-out text, bytes that this rank has sent) on rank 0."""
    model = GPT(GPTConfig.named("tiny"))
    parallel = wrap(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    before, curve = LEDGER.total().bytes_sent, []
    for step in range(1, steps + 1):
        x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, seed, step - 1, BATCH, LENGTH))
        loss_of(parallel(x), y).backward()
        end_step(parallel, optimizer)
        if rank == 0 and (step % options.get("sync_every", 10) == 0 or step == steps):
            with torch.no_grad():
                loss = loss_of(model(windows[:, :-1]), windows[:, 1:]).item()
            curve.append((step, loss, LEDGER.total().bytes_sent - before))
    return curve


curves = {"float32": train(BucketDataParallel)}
curves["top 1%, no feedback"] = train(CompressedDataParallel, compress="topk", error_feedback=False)

# %%
def show_losses(*names):
    for name in names:
        curve = pull("curves", [0])[0][name]
        losses = [f"step {step}: {loss:.2f} nats" for step, loss, _ in curve if step in (50, 100, 199, 200)]
        print(f"{name:<24}{', '.join(losses):<55}{curve[-1][2] / 1e6:6.2f} MB sent")


def last_loss(name):
    return pull("curves", [0])[0][name][-1][1]


show_losses("float32", "top 1%, no feedback")

# %% [markdown]
# (The loss is in nats. Before the first step it is ln 256 = 5.5: each of 256 bytes is as likely as the others.) After 200
# steps top-k without feedback is 0.17 nats behind float32. **Predict**: how many of these 0.17 nats does error feedback win
# back?

# %%
rescued = predict("How many nats does error feedback win back?", example=0.15, unit="nats")

# %%
# %%ranks
curves["top 1%, feedback"] = train(CompressedDataParallel, compress="topk")
curves["PowerSGD, no feedback"] = train(CompressedDataParallel, compress="powersgd", error_feedback=False)
curves["PowerSGD"] = train(CompressedDataParallel, compress="powersgd")
curves["int8"] = train(CompressedDataParallel, compress="int8")
for seed in (1, 2):
    curves[f"float32, other text {seed}"] = train(BucketDataParallel, seed=seed)

# %%
show_losses(*pull("curves", [0])[0])
rescued.compare(last_loss("top 1%, no feedback") - last_loss("top 1%, feedback"))

# %% [markdown]
# Hardly any of them: it is not rescued here, although after 50 steps feedback does help. Theory promises that SGD converges, and
# neither how fast, nor anything about AdamW. PowerSGD and int8 lose little. The last two lines show how much a loss depends on
# the text: trainings with float32 differ by up to 0.05 nats at the same step. So smaller differences, such as that between
# int8 and float32, say nothing.

# %% [markdown]
# ## Less often
#
# Each rank trains H steps alone, and then the ranks average their *parameters*. This is *local SGD*. In H steps a rank sends
# what data parallelism sends in one.
#
# **A common belief**: "averaging parameters is averaging gradients". Let us see with one parameter, w = 64. On ranks 0 and 1
# the loss is w²/2, so a step of SGD with learning rate 0.5 halves w. On ranks 2 and 3 it is w²/4, and a step leaves 3/4 of w.
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
        w = parallel(torch.ones(1))
        (w**2 * [1 / 2, 1 / 2, 1 / 4, 1 / 4][rank]).sum().backward()
        end_step(parallel, optimizer)
    return layer.weight.item()


w = train_w(LocalSGD, sync_every=2)

# %%
averaged.compare(pull("w")[0])

# %% [markdown]
# After one step alone, ranks 0 and 1 are at 32 and ranks 2 and 3 at 48. The mean is 40, as with averaged gradients. In the
# second step a rank computes its gradient where only its own first step has led: 16 and 36, and the mean is 26. So for *one*
# step of plain SGD the belief is true, because such a step is linear in the gradient. It is false for more steps.
#
# Now a GPT takes four steps, with SGD or with AdamW, and with H = 1 or H = 4: four runs. **Predict**: in how many of them does
# it end with the parameters of data parallelism?

# %%
equal_runs = predict("In how many of four runs are the parameters equal?", example=2)

# %%
# %%ranks
def parameters_after(wrap, optimizer_class, **options):
    """Return all parameters of a GPT after four steps, in float64."""
    model = GPT(GPTConfig.named("tiny")).double()
    parallel = wrap(model, **options)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    for step in range(4):
        x, y = (rank_slice(part, rank, world_size) for part in global_batch(text, 0, step, 8, LENGTH))
        loss_of(parallel(x), y).backward()
        end_step(parallel, optimizer)
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
equal_runs.compare(sum(pull("equal")[0].values()))

# %% [markdown]
# Only SGD with H = 1 does. AdamW divides each rank's gradient by that rank's own average size, which is not linear. So with
# AdamW even H = 1 is another training. (AdamW's moments, m and v, stay on their rank. To average them, too, would send three
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
for H in (8, 25, 100):
    curves[f"H = {H}"] = train(LocalSGD, sync_every=H)
curves["H = 100, one step less"] = train(LocalSGD, sync_every=100, steps=199)
curves["alone"] = train(lambda model: model)
curves["DiLoCo 25"] = train(DiLoCo, sync_every=25)  # explained below

# %%
show_losses("float32", "H = 8", "H = 25", "H = 100", "H = 100, one step less", "alone", "DiLoCo 25")
rarely.compare(last_loss("H = 100") - last_loss("float32"))

# %% [markdown]
# At equal steps the belief is true. float32 had the loss of H = 100 after about 120 steps, so 80 of the 200 steps are lost. But
# H = 100 has sent a hundredth of the bytes. The averages do win something: one step before the last one, rank 0 has trained 99
# steps alone, and its loss is larger. A rank that trains *alone* from the first step sees its own quarter of the text only, and
# is 0.09 nats behind H = 100. H = 8, 25 and 100 are too close to each other to tell them apart by one run. This is a tiny model
# in its first steps, so measure H for your own.
#
# *DiLoCo* (Douillard et al., 2023) sends the same bytes. It treats the mean change, old parameters - mean of the new ones, as
# a gradient. A second, *outer* optimizer takes a step with it: SGD with Nesterov momentum, which remembers in which direction
# the last rounds went. With an outer learning rate of 1 and no momentum that is the plain average. The paper has a rate of 0.7
# and a momentum of 0.9.
#
# Here it is no better than the plain average. The paper has its gain in trainings that are much longer, of much larger
# models, and one run with one setting says nothing about others.
#
# ## Loss against seconds
#
# Now the question of the beginning: how long does each way take to a given loss? The time of a step is the sum of the first
# section. A step of this tiny GPT computes for 2 ms, on a device that we think of. The own work is measured as above, with the
# shapes of this GPT. An average every H steps has the work of float32 once in H steps. The bytes are counted.

# %%
# %%ranks
tiny_shapes = [p.shape for p in GPT(GPTConfig.named("tiny")).parameters()]
names = ("float32", "int8", "powersgd")
own = {name: milliseconds(name, tiny_shapes, 0.002, steps=100) - 2 for name in names}

# %%
own, curves = pull("own", [0])[0], pull("curves", [0])[0]
work = {
    "float32": own["float32"],
    "int8": own["int8"],
    "PowerSGD": own["powersgd"],
    "H = 8": own["float32"] / 8,
    "H = 100": own["float32"] / 100,
}  # ms in a step
print("In a step         computing + own work + wire at 200 Mbit/s")
for name in work:
    steps, _, sent = curves[name][-1]
    print(f"{name:<18}     2 ms  {work[name]:8.2f} ms  {1000 * sent * 8 / 200e6 / steps:8.2f} ms")

# %% [markdown]
# A wire is the same on all computers, and the own work is not: a GPU needs far less time for it. So there are two tables, with
# the own work of this computer and without any. The loss to reach is the one of H = 100 after its 200 steps, and float32 has
# it after about 120. **Predict**: at 200 Mbit/s and without own work, how many times as long as float32 does H = 100 take?

# %%
faster = predict("How many times as long does H = 100 take?", example=0.01, unit="times as long")

# %%
goal = curves["H = 100"][-1][1]


def seconds(name, steps, sent, megabits, own_share):
    return steps * (2 + own_share * work[name]) / 1000 + sent * 8 / (megabits * 1e6)


LINKS = (200, 1000, 10_000)  # Mbit/s
for own_share, title in ((1, "with own work"), (0, "without own work")):
    print(f"{title:<18}" + "".join(f"{link:>13,} Mbit/s" for link in LINKS))
    totals = {}
    for name in work:
        reached = ((step, sent) for step, loss, sent in curves[name] if loss <= goal)
        at = next(reached, (float("inf"), float("inf")))
        totals[name] = [seconds(name, *at, link, own_share) for link in LINKS]
        ratios = [total / first for total, first in zip(totals[name], totals["float32"])]
        print(f"{name:<18}" + "".join(f"{ratio:6.2f} times as long" for ratio in ratios))
faster.compare(totals["H = 100"][0] / totals["float32"][0])

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
for name, color in zip(work, COLORS.values()):
    steps, losses, sent = zip(*curves[name])
    along = steps, [one / 1e6 for one in sent], [seconds(name, *one, 200, 0) for one in zip(steps, sent)]
    for panel, x in zip(axes, along):
        panel.plot(x, losses, color=color, label=name, marker="o", markersize=3)
for panel, name in zip(axes, ("steps", "MB that a rank has sent", "seconds at 200 Mbit/s, without own work")):
    panel.set_xlabel(name)
    panel.axhline(goal, color="gray", linestyle=":")
axes[0].set_ylim(2.65, 3.3)
axes[0].set_ylabel("loss on held-out text (nats)")
axes[1].set_xscale("log")
axes[2].set_xscale("log")
axes[2].legend(fontsize=8)
show(
    figure,
    alt="Loss against steps, bytes and seconds, with a dotted line for the loss to reach. Against steps float32 and int8 are "
    "the lowest lines. Against bytes and against seconds at 200 Mbit/s float32 crosses the dotted line last.",
)

# %% [markdown]
# Without own work, a step with float32 at 200 Mbit/s is four fifths sending. All that reach the loss do it in less than half of
# the time, although they need more steps. At 1 Gbit/s they gain less, and at 10 Gbit/s there is nothing left to gain, and each
# further step costs. With the own work of this computer, the compressors lose much of their gain or all of it, as int8 did in
# the first table. Ranks that average every H steps gain on all links, because they also save the work of most all-reduces.
# (Top-k does not reach the loss in 200 steps.)
#
# The sum leaves out that sending can overlap with the backward. `python benchmarks/sending_less.py` measures the same table
# with overlap, for a larger model.
#
# ## Less far
#
# The third way leaves the training as it is. Often several GPUs are in one machine, with fast links, and only the network
# between machines is slow. ZeRO 3 ([notebook 06](06_zero_and_fsdp.ipynb)) divides everything among all ranks, so its gathers
# of parameters cross the network. *Hybrid sharding* divides it among the ranks of a machine, and each machine has a full
# copy. Parameters are gathered within the machine. Over the network goes an all-reduce of gradients: each rank averages those
# of its shard with the rank of the other machine that has the same shard.
#
# Let ranks 0 and 1 be one machine and ranks 2 and 3 another one. ZeRO 3 gathers parameters twice in a step, and has one
# reduce-scatter of gradients, each in a ring of all ranks. Rank 1 is the last one of its machine: all that it sends goes to
# rank 2, on the other machine. **Predict**: how many times as many bytes leave this machine, from both of its ranks together,
# with ZeRO 3 as with hybrid sharding?

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
# About twice as many. Let B be the bytes of all parameters, with n ranks on k machines. Out of a machine go
#
# $$\text{ZeRO 3:} \quad 3 \, \frac{n-1}{n} \, B \qquad\qquad \text{hybrid sharding:} \quad 2 \, \frac{k-1}{k} \, B$$
#
# For four ranks on two machines that is 2.25 times as many, and for many ranks and machines 1.5 times. (Here it is a little
# less, because the last block and the root stay full between forward and backward.) With microbatches ZeRO 3 sends all of it
# again for each, and hybrid sharding still once in a step. The price is memory: parameters, gradients and optimizer state are
# divided among the ranks of one machine only.
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
