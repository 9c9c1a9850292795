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
# to know `%%ranks` and `predict` from [notebook 02](02_collectives.ipynb), the cost of an all-reduce from
# [03](03_cost_of_a_message.ipynb), and buckets from [05](05_overlap_and_buckets.ipynb): flat tensors in which several
# gradients travel together. The last section needs microbatches from [04](04_naive_data_parallel.ipynb) and ZeRO 3 from
# [06](06_zero_and_fsdp.ipynb).

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
# the sign, the exponent, and 7 bits of the fraction. The ranks also add up in bf16, so each sum on the way is rounded again.
#
# **A common belief**: "half the bits, half the time". Four ranks average 4.2 MB of gradients. To see the time we need one
# device for each rank, and your computer may have only a few cores. So computing is replaced by a sleep of 40 ms. The messages
# are real. The sleep is in the forward, so nothing is sent meanwhile, and the time of a step is a sum:
#
# $$\text{step} = \text{computing} + \text{own work} + \frac{2(n-1)}{n} \cdot \frac{\text{bytes of the gradients}}{\text{bytes per second}}$$
#
# Computing is the sleep. The *own work* of a method is to compress, copy, pass on and add up. We measure it on a link that is
# so fast, 1 Tbit/s, that the last part is nearly 0:

# %%
# %%ranks
import statistics
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


def milliseconds(compress, shapes, seconds, link="1000gbit", steps=20):
    """Return the median time of some steps on a link."""
    model, found = CompressedDataParallel(Sleeper(shapes, seconds), compress), []
    with slow_link.slowed(slow_link.parse(link)):
        for _ in range(steps):
            model.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            model().backward()
            model.finish_gradient_sync()
            found.append(time.perf_counter() - start)
    return 1000 * statistics.median(found)


FOUR_MB = [(256, 1024)] * 4
SHARES = {"float32": 1, "bf16": 1 / 2, "int8": 1 / 4}  # of the bits
own = {compress: milliseconds(compress, FOUR_MB, 0.04) - 40 for compress in SHARES}

# %%
for compress, its_own in pull("own")[0].items():
    print(f"own work of {compress:<7} {its_own:4.0f} ms")

# %% [markdown]
# The last part of the sum is the time on the wire: with float32 50 ms at 1 Gbit/s, since n = 4. **Predict**: how many times as
# long as a step with float32 does a step with bf16 take there? (A number is right within a tenth of the result. You can also
# type a range, such as 0.5-0.6.)

# %%
half = predict("How many times as long does a step with bf16 take?", example=0.5, unit="times as long")

# %%
# %%ranks
times = {
    link: {compress: milliseconds(compress, FOUR_MB, 0.04, link) for compress in SHARES}
    for link in ("200mbit", "1gbit", "10gbit")
}

# %%
own, times, shares = (pull(name)[0] for name in ("own", "times", "SHARES"))
wire = {"200mbit": 252, "1gbit": 50, "10gbit": 5}  # ms for 6.3 MB in float32
print(" " * 8 + "".join(f"{name + ': the sum, measured':>32}" for name in own))
worst = 0
for link, row in times.items():
    sums = {name: 40 + own[name] + shares[name] * wire[link] for name in row}
    print(f"{link:<8}" + "".join(f"{sums[name]:20.0f} ms, {found:4.0f} ms" for name, found in row.items()))
    worst = max(worst, *(abs(sums[name] - found) for name, found in row.items()))
print(f"the sum is off by up to {worst:.0f} ms")
half.compare(times["1gbit"]["bf16"] / times["1gbit"]["float32"])

# %% [markdown]
# It is more than half, because half the bits take half the time *on the wire* only. At 200 Mbit/s the wire takes most of the
# step, and bf16 takes about 0.6 of the time of float32. At 10 Gbit/s there is almost nothing to halve, and the own work
# decides: int8, which has the most, takes longer than float32. At 1 Gbit/s the two can end either way.
#
# The sum is an estimate. A rank also copies and adds up while the wire is busy, so a part of the own work is counted twice. And
# four ranks share your few cores, so times vary. Where two methods are closer than the sum is off, it does not say which one
# is faster. (On a GPU of its own a rank compresses much faster.)
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
# each rank gathers those of all others: 8 (n-1) bytes for each number that is kept, 4 for the number and 4 for its place. A
# ring all-reduce sends 8 (n-1)/n bytes for each number. So the share of the bytes is n times the share of the numbers, and
# with 100 ranks nothing is saved.
#
# *PowerSGD* sends something that can be added up. It writes a matrix of gradients, M, as a product of two thin ones, P Qᵀ.
# Here M is the gradient of a layer of a small GPT, 512 x 128. P is 512 x 4 and Q is 128 x 4, so together they have 26 times
# fewer numbers than M. All ranks begin with the same random Q. A step is this:
#
# 1. Each rank computes P = M Q with its own M, and the ranks average P. That is allowed, because M Q is linear in M: the mean
#    of the products is the product with the mean of M.
# 2. Each rank makes the columns of P orthonormal: it keeps the 4 directions that they span, but now the columns are at right
#    angles and have length 1.
# 3. Each rank computes Q = Mᵀ P, and the ranks average Q.
# 4. P Qᵀ takes the place of the mean of M. It is P Pᵀ M: the part of M in the 4 directions of P. Without step 2 it would have
#    the wrong size.
#
# Which directions are good? Those that hold much of M. In P = M Q, the directions that hold most of M become the longest. So
# the next step begins with this step's Q, and comes closer to them.
#
# The *singular values* of M say how much each of its 128 directions holds: the sum of their squares is the squared norm of M.
# P Qᵀ has only 4 directions, so it can hold no more than the 4 largest. **Predict**: what share of the squared
# norm do these 4 hold, for the mean of M over the ranks? Type a range, 0-0.5 or 0.5-1. (If all 128 were equal, the 4 would
# hold 0.03. The GPT has not been trained yet, and M is a sum over 1,024 tokens.)

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
# Here is the error of one step of all compressors, on all gradients of this GPT:

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
print("        share of bytes    error")
for name, error in pull("errors")[0].items():
    share = pull("sent")[0][name] / pull("sent")[0]["float32"]
    print(f"{name:<10} {share:10.3f} {error:#9.2g}")

# %% [markdown]
# bf16 and int8 hardly change the gradients. Top-k and PowerSGD send about a twentieth of the bytes, and leave out much in one
# step. It need not be lost. (PowerSGD's 0.20 may be below the 0.24 for M, because these are other gradients, and vectors are
# sent as they are. In the tiny GPT below all matrices are so small that it sends a fifth.)
#
# ## Error feedback
#
# A rank keeps what it has not sent, and adds it to its gradient in the next step. This is *error feedback*:
#
# $$\text{sent} + \text{what remains} = \text{gradient} + \text{what remained before}$$
#
# (With PowerSGD, what a rank has *sent* is P Qᵀ with its own Q, before the average: its part of the mean.)
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
# Now let us train. A tiny GPT takes 200 steps on text, on four ranks with AdamW. All ranks and all trainings start with the
# same weights, since GPT draws them with a fixed seed. int8 has error feedback, and PowerSGD trains with it and without.

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
for seed in (1, 2):
    curves[f"float32, other text {seed}"] = train(BucketDataParallel, seed=seed)
curves["int8"] = train(CompressedDataParallel, compress="int8")
curves["PowerSGD"] = train(CompressedDataParallel, compress="powersgd")
for compress, name in (("powersgd", "PowerSGD"), ("topk", "top 1%")):
    curves[f"{name}, no feedback"] = train(CompressedDataParallel, compress=compress, error_feedback=False)

# %%
def show_losses(*names, steps=(50, 100, 200)):
    for name in names:
        curve = pull("curves", [0])[0][name]
        losses = [f"step {step}: {loss:.2f} nats" for step, loss, _ in curve if step in steps]
        print(f"{name:<23} {', '.join(losses):<60} {curve[-1][2] / 1e6:5.2f} MB sent")


def last_loss(name):
    return pull("curves", [0])[0][name][-1][1]


show_losses(*pull("curves", [0])[0])

# %% [markdown]
# (The loss is in nats. Before the first step it is ln 256 = 5.5: each of 256 bytes is as likely as the others.)
#
# With float32 the three texts end within 0.01 nats of each other, though at step 50 they differ by 0.05. We compare at step
# 200, on the same text. There int8 is 0.02 behind float32 and PowerSGD 0.04: they lose little, and one run does not say
# how much exactly. Without feedback PowerSGD is 0.09 behind, so feedback wins back half of it.
#
# Top-k without feedback is 0.17 behind, and here is another **common belief**: "error feedback rescues top-k". **Predict**:
# how many of these 0.17 nats does feedback win back? Type a range: is it more than half, 0.085-0.17, or less, 0-0.085?

# %%
rescued = predict("How many nats does error feedback win back?", example=0.15, unit="nats")

# %%
# %%ranks
curves["top 1%, feedback"] = train(CompressedDataParallel, compress="topk")
# %%
show_losses("float32", "top 1%, no feedback", "top 1%, feedback")
rescued.compare(last_loss("top 1%, no feedback") - last_loss("top 1%, feedback"))

# %% [markdown]
# Hardly any, although after 50 steps feedback does help. We know of no proven reason. Theory says that *SGD* with error
# feedback converges, if each step sends at least a fixed share of the squared norm (Karimireddy et al., 2019). It says
# neither how fast, nor anything about AdamW.
#
# But do not conclude that feedback is useless with AdamW. The [lesson's benchmark](../low_communication/README.md) trains a GPT
# of 2.5 million parameters for longer, until the loss that float32 reaches in 400 steps. Top-k needs 719 steps with feedback,
# and 1,200 are not enough without it. PowerSGD needs 436 and 814, and int8 391 and 400. What is never sent is never learned,
# and in a longer training that counts more.

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
# Only SGD with H = 1 does. AdamW divides each rank's gradient by the average size of that rank's gradients, which is not
# linear. So with AdamW even H = 1 is another training. (AdamW's moments, m and v, stay on their rank. To average them, too,
# would send three times as much.)
#
# ## One synchronisation in 100 steps
#
# Is another training a worse one? **A common belief**: "at one synchronisation in 100 steps the loss must suffer". First the
# two ends: the ranks average in every step, or never. It is the same tiny GPT, and a rank *alone* sees its own quarter of the
# text only.

# %%
# %%ranks
curves["H = 1"] = train(LocalSGD, sync_every=1)
curves["alone"] = train(lambda model: model)

# %%
show_losses("float32", "H = 1", "alone")

# %% [markdown]
# H = 1 is already 0.06 behind. One window has noisier gradients than the mean of four, so their average size is larger. AdamW
# divides by it, and so the mean of the ranks' steps is shorter. Alone a rank is 0.21 behind. **Predict**: how many nats behind
# float32 is H = 100 after 200 steps, in which the ranks average twice? Type a range.

# %%
rarely = predict("How many nats behind float32 is H = 100?", example=0.2, unit="nats")

# %%
# %%ranks
for H in (8, 25, 100):
    curves[f"H = {H}"] = train(LocalSGD, sync_every=H)
curves["H = 100, one step less"] = train(LocalSGD, sync_every=100, steps=199)

# %%
show_losses("float32", "H = 8", "H = 25", "H = 100", "H = 100, one step less", "alone", steps=(100, 199, 200))
print("\nOn the way:")
show_losses("float32", steps=(110, 120, 130, 140))
rarely.compare(last_loss("H = 100") - last_loss("float32"))

# %% [markdown]
# At equal steps the belief is true: H = 100 is 0.12 behind, and H = 1 loses half of that, too. float32 had this loss after about
# 120 steps, so about 80 of the 200 are lost. (About, because the curve is noisy: at step 130 it is no lower.) But H = 100 has
# sent a hundredth of the bytes. The averages do win something: one step before the last one, rank 0 has trained 99 steps
# alone, and its loss is larger. H = 8, 25 and 100 are too close to each other to tell them apart by one run. This is a tiny
# model in its first steps, so measure H for your own.
#
# *DiLoCo* (Douillard et al., 2023) sends the same bytes. It treats the mean change, old parameters - mean of the new ones, as
# a gradient. A second, *outer* optimizer takes a step with it: SGD with momentum (Nesterov's), which remembers in which
# direction the last rounds went. With an outer learning rate of 1 and no momentum that is the plain average. The paper has
# 0.7 and 0.9:

# %%
# %%ranks
curves["DiLoCo, H = 25"] = train(DiLoCo, sync_every=25, outer_lr=0.7, outer_momentum=0.9)

# %%
show_losses("H = 25", "DiLoCo, H = 25")

# %% [markdown]
# Here it is a little worse than the plain average. But it had 8 rounds only, and a momentum of 0.9 remembers about 10. The
# lesson's benchmark has H = 32, and gives medians of three seeds: plain averaging needs 622 steps, rate 1 with momentum 0.3
# 559, and the paper's 0.7 and 0.9 1,053, with one of the seeds more than 1,200.
#
# ## Loss against seconds
#
# Now the question of the beginning: how long does each way take to a given loss? A step takes the sum of the first section.
# Let c be the time of computing in a step, and w that of sending all gradients. A method needs k times as many steps as
# float32, sends the share s of the bytes, and has p of own work in a step. Leave out float32's own work. Then the method pays
# if
#
# $$k \, (c + p + s w) < c + w$$
#
# We assume that a step of this tiny GPT computes for c = 2 ms. p is measured as above, with the shapes of this GPT. An
# average every H steps has the own work of float32 once in H steps. s is counted. k depends on the loss to reach: here it is
# the one that H = 100 has after 200 steps.

# %%
# %%ranks
tiny_shapes = [p.shape for p in GPT(GPTConfig.named("tiny")).parameters()]
names = ("float32", "int8", "powersgd")
own = {name: milliseconds(name, tiny_shapes, 0.002, steps=100) - 2 for name in names}

# %%
own, curves = pull("own", [0])[0], pull("curves", [0])[0]
p = {
    "float32": own["float32"],
    "int8": own["int8"],
    "PowerSGD": own["powersgd"],
    "H = 8": own["float32"] / 8,
    "H = 100": own["float32"] / 100,
}  # ms in a step
goal = last_loss("H = 100")


def steps_to(name, goal):
    return next((step for step, loss, _ in curves[name] if loss <= goal), float("inf"))


k = {name: steps_to(name, goal) / steps_to("float32", goal) for name in p}
s = {name: curves[name][-1][2] / curves["float32"][-1][2] for name in p}
for name in p:
    print(f"{name:<9} in steps: k = {k[name]:.2f} times as long   s = {s[name]:.3f}   p = {p[name]:5.2f} ms")
w = curves["float32"][-1][2] / 200 * 8 / 200e6 * 1000  # ms in a step
print(f"w = {w:.2f} ms at 200 Mbit/s")
print("not at 2.75 nats after 200 steps:", ", ".join(name for name in p if steps_to(name, 2.75) > 200))

# %% [markdown]
# The winner depends on the loss to reach: at 2.75 nats neither H = 8 nor H = 100 arrives in 200 steps. (At the loss of H = 100,
# top-k and DiLoCo do not.)
#
# A wire is the same on all computers, and the own work is not: a GPU needs far less time for it. So there are two tables, with
# the own work of this computer and without any. **Predict**: at 200 Mbit/s and without own work, how many times as long as
# float32 does H = 100 take? The formula says it.

# %%
faster = predict("How many times as long does H = 100 take?", example=0.01, unit="times as long")

# %%
def ms_of_step(name, megabits, own_share):
    return 2 + own_share * p[name] + s[name] * w * 200 / megabits


def times_as_long(name, *how):
    return k[name] * ms_of_step(name, *how) / ms_of_step("float32", *how)


LINKS = (200, 1000, 10_000)  # Mbit/s
for own_share, title in ((1, "with own work"), (0, "without own work")):
    print(f"{title:<18}" + "".join(f"{link:>13,} Mbit/s" for link in LINKS))
    for name in p:
        ratios = [times_as_long(name, link, own_share) for link in LINKS]
        print(f"{name:<18}" + "".join(f"{ratio:6.2f} times as long" for ratio in ratios))
faster.compare(times_as_long("H = 100", 200, 0), by="formula")

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
for name, color in zip(p, COLORS.values()):
    steps, losses, sent = zip(*curves[name])
    along = steps, [one / 1e6 for one in sent], [step * ms_of_step(name, 200, 0) / 1000 for step in steps]
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
# Without own work, a step with float32 at 200 Mbit/s is four fifths sending. All methods in the table reach the loss in less
# than half of the time, although they need more steps. At 1 Gbit/s they gain less, and at 10 Gbit/s nothing: each further step
# costs.
#
# With the own work of this computer, int8 and PowerSGD lose all or nearly all of their gain. Then ranks that average every H
# steps gain on all links, because they also save the own work of most all-reduces. (float32's own work is in this table, too.)
#
# So what pays when?
#
# - *Fewer bits* (int8): k is about 1. It pays if compressing takes less time than it saves on the wire: p < (1 - s) w.
# - *Less often* (local SGD, DiLoCo): s is 1/H and there is nothing to compress. For a large H it pays if w > (k - 1) c. In
#   the lesson's benchmark DiLoCo with momentum 0.3 needs k = 559 / 400 = 1.4 times the steps, so it pays where sending takes
#   more than 0.4 of the time of computing.
#
# The sum leaves out that sending can overlap with the backward. `python benchmarks/sending_less.py` measures with overlap.
#
# ## Less far
#
# The third way leaves the training as it is. Often several GPUs are in one machine, with fast links, and only the network
# between machines is slow. ZeRO 3 ([notebook 06](06_zero_and_fsdp.ipynb)) divides everything among all ranks, so its gathers
# of parameters cross the network. *Hybrid sharding* (HSDP) divides it among the ranks of a machine, and each machine has a
# full copy. Parameters are gathered within the machine. Over the network goes an all-reduce of gradients: each rank averages
# those of its shard with the rank of the other machine that has the same shard.
#
# Let ranks 0 and 1 be one machine and ranks 2 and 3 another one. ZeRO 3 has a reduce-scatter of gradients, and gathers
# parameters twice in a step, each in a ring of all ranks. But it gathers the last block, and the parameters outside of all
# blocks, only once, because they stay gathered between forward and backward: here 0.29 of all. Rank 1 is the last one of its
# machine: all that it sends goes to rank 2, on the other machine. **Predict**: how many times as many bytes leave this
# machine, from both of its ranks together, with ZeRO 3 as with hybrid sharding?

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
# For four ranks on two machines that is 2.25 times as many, and for many ranks and machines 1.5 times. (Here the 3 is 2.71,
# because of what stays gathered.) With microbatches ZeRO 3 sends all of it again for each, and hybrid sharding still once in a
# step. The price is memory: parameters, gradients and optimizer state are divided among the ranks of one machine only.
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
# - [low_communication/README.md](../low_communication/README.md): the lesson, with the time to a loss of the larger model
# - Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, [arXiv:1805.09767](https://arxiv.org/abs/1805.09767)
# - Douillard et al., "DiLoCo", 2023, [arXiv:2311.08105](https://arxiv.org/abs/2311.08105)
# - Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, [arXiv:1901.09847](https://arxiv.org/abs/1901.09847)
# - Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, [arXiv:1905.13727](https://arxiv.org/abs/1905.13727)
# - Zhao et al., "PyTorch FSDP", VLDB 2023, [arXiv:2304.11277](https://arxiv.org/abs/2304.11277): hybrid sharding

# %%
# %ranks stop
