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
# # 04 Naive data parallel
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/04_naive_data_parallel.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** Four ranks have the same model, and each has a quarter of the batch. What must they tell each other, so
# that the training is exactly the training of one process with the full batch?
#
# You need about 40 minutes. The two files that go with this notebook are
# [train_naive.py](../data_parallel/train_naive.py) and
# [train_naive_grad_accumulation.py](../data_parallel/train_naive_grad_accumulation.py). They have the solutions of two
# exercises at the end, so read them after those. You should know what an all-reduce is (notebook 02).
#
# Two words first, because they are often mixed up:
#
# - *Parallelism* is about work: who computes what at the same time. In **data parallel** every rank computes the same
#   model on other examples.
# - *Sharding* is about memory: who stores what. A **shard** is the part of a tensor that one rank owns. In this notebook
#   only the batch is divided. Model, gradients and optimizer are **replicated**: every rank has all of them. Notebook 06
#   shards those, too, and is still data parallel.

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
# there. `rank`, `world_size`, `torch` and `dist` (which is `torch.distributed`) are defined. The value of the last line
# is shown for each rank, and once for ranks that have the same one. All other cells run here, in the notebook's own
# process; `pull("x")` brings the ranks' `x` here, as a dictionary by rank.

# %%
import torch
from matplotlib import pyplot as plt

from lab.notebook.picture import COLORS, show, show_events
from lab.notebook.prediction import predict

# %% [markdown]
# ## One weight, four examples
#
# The smallest training there is: the model is `w * x`, it should learn `y = x`, and the weight starts at 0. One process
# takes four examples, and the loss is their mean squared error.

# %%
x = torch.tensor([1.0, 2.0, 3.0, 4.0])
w = torch.tensor(0.0, requires_grad=True)
((w * x - x) ** 2).mean().backward()
w.grad

# %% [markdown]
# Now each of the four ranks takes one of the examples, and computes the gradient of *its* loss.

# %%
# %%ranks
x = torch.tensor([1.0, 2.0, 3.0, 4.0])[rank : rank + 1]
w = torch.tensor(0.0, requires_grad=True)
((w * x - x) ** 2).mean().backward()
w.grad

# %% [markdown]
# Four different gradients. If each rank took a step with its own, there would be four different models after the first
# step. The ranks must agree on one gradient. **Predict**: they add up their four gradients with an all-reduce. How many
# times too large is the sum, compared with the gradient of one process?

# %%
factor = predict("How many times too large is the sum of the gradients?", example=1, unit="times")

# %%
# %%ranks
from comm.collectives import all_reduce

total = w.grad.clone()
all_reduce(total, op="sum")
total

# %%
factor.compare(pull("total.item()")[0] / w.grad.item())

# %% [markdown]
# The loss of one process is a *mean* over four examples: each example counts a quarter. Each rank has divided by the
# number of its own examples only, which is 1. So the sum over n ranks is n times too large, and the ranks need the mean.

# %%
# %%ranks
mean = w.grad.clone()
all_reduce(mean, op="mean")
mean

# %% [markdown]
# This is all the mathematics of data parallel: the mean over ranks of the means over slices is the mean over the batch.
# It holds **if the slices have equal size**. With slices of 3 and 1 examples, the lonely example would count three times
# as much as each of the others.
#
# ## A step of a real model, slowly
#
# `BabyCNN` is a network of two convolutions and two linear layers for handwritten digits of 8 x 8 pixels. Each rank makes
# one, with random numbers of its own, in double precision. This is the first kernel of the first convolution on each rank,
# shown in single precision:

# %%
# %%ranks
from lab.models.model import BabyCNN, loss_of

torch.set_printoptions(precision=2)
model = BabyCNN(seed=rank).double()
model.conv1.weight.detach()[0, 0].float()

# %% [markdown]
# **1. Equal weights.** The wrapper broadcasts rank 0's weights once, when it is made.

# %%
# %%ranks
from data_parallel.train_naive import NaiveDataParallel

parallel = NaiveDataParallel(model)
model.conv1.weight.detach()[0, 0].float()

# %% [markdown]
# All four ranks have the same kernel now, so it is shown once. Each copy of the model is a *replica*.
#
# **2. Equal slices.** The global batch has 8 images. Each rank takes two of them. These are their labels:

# %%
# %%ranks
from lab.models.digits import load_digits
from lab.models.text import rank_slice

images, labels, test_images, test_labels = load_digits()
x = rank_slice(images[:8], rank, world_size).double()
y = rank_slice(labels[:8], rank, world_size)
y

# %% [markdown]
# **3. Forward and backward**, on each rank for itself. The gradients of the last layer's first four biases differ:

# %%
# %%ranks
loss = loss_of(parallel(x), y)
loss.backward()
model.linear2.bias.grad[:4].float()

# %% [markdown]
# **4. The mean of the gradients.** `finish_gradient_sync()` all-reduces them, one parameter after the other. At its heart is a
# loop of five lines. You will write it in the exercise `naive_gradient_sync` at the end of this notebook; read
# [train_naive.py](../data_parallel/train_naive.py) after that.

# %%
# %%ranks
parallel.finish_gradient_sync()
model.linear2.bias.grad[:4].float()

# %% [markdown]
# Is that the gradient of one process? The notebook is a process of its own. It makes the same model, computes the
# gradients of the full batch of 8 images, and compares all of them with those of rank 0. `assert_same` allows a relative
# difference of 0.000 000 001, because sums in another order are rounded in another way.

# %%
from lab.check import assert_same, reference_gradients
from lab.models.digits import load_digits
from lab.models.model import GPT, IGNORED, BabyCNN, GPTConfig, loss_of

images, labels, *_ = load_digits()
alone = BabyCNN(seed=0).double()
expected = reference_gradients(alone, lambda model: loss_of(model(images[:8].double()), labels[:8]))
measured = pull("{name: p.grad for name, p in model.named_parameters()}")
assert_same(measured[0], expected)
print(f"{len(expected)} gradients of rank 0 agree with those of one process.")

# %% [markdown]
# **5. The same step everywhere.** Each rank calls its own optimizer. Nothing is sent: equal weights and equal gradients
# give equal weights, bit for bit.

# %%
# %%ranks
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

# %%
replicas = pull("weights")
print(
    "All replicas are equal bit for bit:", all(torch.equal(replicas[0], other) for other in replicas.values())
)

# %% [markdown]
# So weights are sent once, at the start, and after that only gradients travel.
#
# ## What the step looks like
#
# On one machine the all-reduces are too fast to see. `slow_link.use` makes every message as slow as on a link of 100
# Mbit/s with a latency of one millisecond. A `span` records when its block began and ended, and `comm` records a span for each
# collective. The next cell runs two steps and draws the second.

# %%
# %%ranks
from comm.wire import slow_link
from lab.trace import timeline
from lab.trace.timeline import span

slow_link.use(slow_link.parse("100mbit,1ms"))
x = rank_slice(images[:192], rank, world_size).double()
y = rank_slice(labels[:192], rank, world_size)
for step in range(2):
    timeline.start_recording()
    optimizer.zero_grad()
    with span("forward", "forward"):
        loss = loss_of(parallel(x), y)
    with span("backward", "backward"):
        loss.backward()
    parallel.finish_gradient_sync()
    with span("step", "optimizer"):
        optimizer.step()
    timeline.stop_recording()
slow_link.use(None)


# %%
def recorded():
    """Return the spans of all ranks."""
    return [event._replace(rank=rank) for rank, own in pull("timeline.recorded()").items() for event in own]


show_events(
    recorded(),
    alt="Timeline of a step on four ranks: on each rank a short forward and backward, then eight all-reduces one "
    "after the other, which take most of the step, then the optimizer.",
)

# %% [markdown]
# Eight orange bars: one all-reduce for each of the eight parameters. All of the communication stands *after* all of the
# computing. That is what is naive about it. While the gradients travel, the processors wait; while the processors compute,
# the link is idle. Notebook 05 changes that.
#
# ## "The loss falls, so it is right"
#
# Suppose you had written `op="sum"`. Would you notice? The next cell defines that wrong wrapper. Then the same weights
# take one step with each wrapper, and `update` is how far a step moves the weights.


# %%
# %%ranks
class Summed(NaiveDataParallel):
    """Wrong: gradients are summed."""

    def finish_gradient_sync(self):
        for parameter in self.module.parameters():
            all_reduce(parameter.grad, op="sum")
        self._guard.expect_gradients()


def train(wrapper, make_optimizer, steps, batch_size=64):
    """Return the losses, and how far the first step has moved the weights."""
    model = BabyCNN(seed=1).double()
    parallel, optimizer = wrapper(model), make_optimizer(model.parameters())
    vector = lambda: torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    start, losses = vector(), []
    for step in range(steps):
        first = step * batch_size % (len(images) - batch_size)
        x = rank_slice(images[first : first + batch_size], rank, world_size).double()
        y = rank_slice(labels[first : first + batch_size], rank, world_size)
        loss = loss_of(parallel(x), y)
        optimizer.zero_grad()
        loss.backward()
        parallel.finish_gradient_sync()
        optimizer.step()
        all_reduce(shown := loss.detach().clone(), op="mean")  # a rank's own loss is that of its slice
        losses.append(shown.item())
        update = (vector() - start).norm().item() if step == 0 else update
    return losses, update


sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.3)
adam = lambda parameters: torch.optim.Adam(parameters, lr=0.003)

# %% [markdown]
# With SGD the update is the learning rate times the gradient, so it is 4 times too large. **Predict**: with Adam, how many
# times too large is the update?

# %%
adams = predict("With Adam, how many times too large is the update?", example=4, unit="times")

# %%
# %%ranks
runs = {
    (optimizer, wrapper.__name__): train(wrapper, make, steps=40)
    for optimizer, make in (("SGD", sgd), ("Adam", adam))
    for wrapper in (NaiveDataParallel, Summed)
}
updates = {key: update for key, (_, update) in runs.items()}
{name: round(updates[name, "Summed"] / updates[name, "NaiveDataParallel"], 2) for name in ("SGD", "Adam")}

# %%
runs = pull("runs")[0]
adams.compare(round(runs["Adam", "Summed"][1] / runs["Adam", "NaiveDataParallel"][1], 2))

# %%
figure, both = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
for axes, optimizer in zip(both, ("SGD", "Adam"), strict=True):
    axes.plot(runs[optimizer, "NaiveDataParallel"][0], color=COLORS["compute"], label="mean (right)")
    axes.plot(runs[optimizer, "Summed"][0], "--", color=COLORS["communication"], label="sum (wrong)")
    axes.set(title=optimizer, xlabel="step", ylim=(0, 4))
both[0].set_ylabel("loss")
both[0].legend()
show(
    figure,
    alt="Two plots of the loss over 40 steps. With SGD the summed gradients give a loss that falls faster at first, "
    "then jumps and stays high; with Adam the curves of mean and sum lie on each other.",
)

# %% [markdown]
# Adam divides each gradient by its own typical size, so a constant factor cancels. The two curves on the right are one
# curve. The run is right by luck, and the luck ends with the first gradient clipping, or with a penalty in the loss, or on
# the day when SGD takes Adam's place. With SGD a factor of n is a learning rate that is n times too large. On the left the
# wrong run looks *better* for a dozen steps: its loss falls faster. Then it breaks, and the network never recovers. So never
# judge by the loss. Compare *gradients* with those of one process, as `assert_same` did above.
#
# ## Why no barrier is needed
#
# Many programs call `barrier()` before the all-reduce, "so that all ranks are there". A barrier lets no rank leave before
# all have arrived. **Predict**: rank 2 is late by half a second. For how long is rank 0 inside the all-reduce, without any
# barrier?

# %%
late = predict("How many seconds is rank 0 in the all-reduce?", example=0, unit="s")

# %%
# %%ranks
import time

if rank == 2:
    time.sleep(0.5)
gradient = torch.ones(1) * rank
began = time.perf_counter()
all_reduce(gradient)
inside = time.perf_counter() - began
print(f"was in the all-reduce for {inside:.2f} s")
gradient

# %%
late.compare(pull("inside")[0])

# %% [markdown]
# The three others wait for rank 2, and their result is right. No rank can have a sum before the last rank has given its
# part, so an all-reduce *is* a meeting of all ranks. A barrier before it costs messages and changes nothing. You need a
# barrier only for an order that no message enforces: rank 0 writes a file, for example, and the others read it.
#
# The lines above also explain something that puzzles many: a profiler shows a slow all-reduce on three ranks, and the
# cause is the fourth rank, the only one whose all-reduce is fast. It was late.
#
# ## Gradient accumulation: the same sum, one after the other
#
# A batch may be too large for the memory of a rank. Then the rank divides its slice into **microbatches**, and runs forward
# and backward for one after the other. `backward()` *adds* to `param.grad`, and after the last microbatch there is one
# optimizer step. This is *gradient accumulation*. It is data parallel in time instead of in space: ranks compute
# different examples at the same moment, microbatches one after the other.
#
# **A common belief**: "gradient accumulation is summing: autograd adds up, so there is nothing to do".
# **Predict**: a rank computes 6 examples as 3 microbatches of 2, and calls `backward()` three times. How many times too
# large is the gradient, compared with that of the 6 examples at once?

# %%
accumulated = predict("How many times too large is the accumulated gradient?", example=1, unit="times")

# %%
x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def gradient_of(parts, divisor):
    """Return the gradient of w after one backward for each part."""
    w = torch.tensor(0.0, requires_grad=True)
    for part in parts:
        (((w * part - part) ** 2).mean() / divisor).backward()
    return w.grad


at_once, summed, divided = gradient_of([x], 1), gradient_of(x.chunk(3), 1), gradient_of(x.chunk(3), 3)
print(
    f"at once {at_once.item():.3f}, summed {summed.item():.3f}, each loss divided by 3: {divided.item():.3f}"
)

# %%
accumulated.compare(summed / at_once)

# %% [markdown]
# It is the mistake of the first section again. Each `mean()` has divided by the 2 examples of its microbatch, and the
# three means were added. So each loss is divided by the number of microbatches. (The lesson's code does it for parts of any
# size: it divides each microbatch's *sum* of losses by the valid targets of the global batch / n, because the all-reduce
# takes a mean over n ranks. Valid targets are those that are not -100.) Without the division, SGD trains as with 3 times the
# learning rate, and Adam hides it. And then a change of the number of microbatches, "only to save memory", changes the training.
#
# Now both together: 4 ranks with 3 microbatches each must give the gradient of one process with 12 times as many
# examples. And what does it cost to all-reduce after *each* microbatch, instead of once? `comm` counts in a ledger what each
# rank sends. **Predict** how many times the bytes the all-reduces after each microbatch send.

# %%
bytes_sent = predict("How many times the bytes?", example=1, unit="times")

# %%
# %%ranks
from data_parallel.train_naive_grad_accumulation import accumulate
from lab.trace.ledger import LEDGER
from lab.models.text import microbatches


def step_of(sync_each):
    """Return the gradients of a step with 3 microbatches, and the bytes that it sends."""
    model = BabyCNN(seed=0).double()
    parallel, before = NaiveDataParallel(model), LEDGER.total()
    x = rank_slice(images[:48], rank, world_size).double()
    y = rank_slice(labels[:48], rank, world_size)
    if sync_each:
        for part, target in microbatches(x, y, 3):
            (loss_of(parallel(part), target) / 3).backward()
            parallel.finish_gradient_sync()
    else:
        accumulate(parallel, microbatches(x, y, 3))  # the lesson's function: all three backwards
        parallel.finish_gradient_sync()
    sent = (LEDGER.total() - before).bytes_sent
    return {name: p.grad for name, p in model.named_parameters()}, sent


once, bytes_once = step_of(sync_each=False)
each, bytes_each = step_of(sync_each=True)

# %%
expected = reference_gradients(
    BabyCNN(seed=0).double(), lambda model: loss_of(model(images[:48].double()), labels[:48])
)
assert_same(pull("once")[0], expected)
assert_same(pull("each")[0], expected)
bytes_sent.compare(pull("bytes_each / bytes_once")[0])

# %% [markdown]
# Both give the right gradients: the parts that are equal on all ranks already do not change when their mean is taken
# again. But one of them sends three times as much. That is why wrappers have `no_sync()`: run all microbatches but the last
# inside it. The naive wrapper does not need it, because it sends nothing before `finish_gradient_sync()`; those of notebook
# 05 do.
#
# What is it good for, then? Memory. Autograd keeps the activations of a forward until its backward, and a microbatch has
# fewer of them.

# %%
from lab.trace.memory import saved_activations

sizes = {}
for num_microbatches in (1, 2, 4, 8):
    part = images[:64].chunk(num_microbatches)[0].double()
    with saved_activations(alone.parameters) as saved:
        alone(part).sum()
    sizes[num_microbatches] = saved.bytes / 1e6

figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
axes.bar([str(number) for number in sizes], sizes.values(), color=COLORS["forward"])
axes.set(xlabel="microbatches for 64 images", ylabel="activations (MB)")
show(
    figure,
    alt="Four bars: the activations that are kept at a time halve whenever the number of microbatches doubles.",
)

# %% [markdown]
# So there are three ways to compute a batch, with one gradient. All at once: fast, and the most memory. In microbatches:
# the memory of one microbatch, and their times add up. On ranks: each has the memory of its slice, they compute at the
# same time, and they pay for an all-reduce. Real trainings use the last two together.
#
# ## Targets that do not count
#
# A chat model is trained on its answers, and not on the prompts. The targets of a prompt are -100, and the loss ignores them:
# it is the mean over the *valid* targets. Prompts have different lengths, so ranks have different numbers of valid targets.
# Let each of the four ranks have 64 targets. On rank 0 prompts are long, and only 8 of its targets are valid.
#
# Each rank computes the mean over its own valid targets, and the gradients are averaged, as above. **Predict**: how many times
# as much as in one process, which takes the mean over all 200 valid targets, does a target of rank 0 count?

# %%
weight = predict("A target of rank 0 counts how many times as much?", example=1, unit="times")

# %%
# %%ranks
from lab.models.model import GPT, IGNORED, GPTConfig
from training.valid_targets import valid_targets

tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
x, y = rank_slice(tokens[:, :-1], rank, world_size), rank_slice(tokens[:, 1:], rank, world_size).clone()
if rank == 0:
    y[:, :28] = IGNORED


def step_with(num_targets):
    """Return the gradients of a step, and those of this rank's logits."""
    model = GPT(GPTConfig.named("tiny")).double()
    parallel = NaiveDataParallel(model)
    logits = parallel(x)
    logits.retain_grad()
    loss_of(logits, y, num_targets).backward()
    parallel.finish_gradient_sync()
    return {name: p.grad for name, p in model.named_parameters()}, logits.grad


means, of_means = step_with((y != IGNORED).sum())  # the mean over this rank's valid targets
right, of_all = step_with(valid_targets(y))  # the sum over them, divided by 200 / 4
ratio = (of_means[:, -1] / of_all[:, -1]).mean().item()

# %%
tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
targets = tokens[:, 1:].clone()
targets[:2, :28] = IGNORED
truth = reference_gradients(
    GPT(GPTConfig.named("tiny")).double(), lambda model: loss_of(model(tokens[:, :-1]), targets)
)
assert_same(pull("right")[0], truth)
means = pull("means")[0]
off = max((means[name] - truth[name]).abs().max() / truth[name].abs().max() for name in truth)
print(f"The mean of the ranks' means gives gradients that are off by up to {off:.0%} of the largest one.")
weight.compare(pull("ratio")[0])

# %% [markdown]
# This is perhaps the most repeated silent bug of the field: nothing fails, the loss falls, and every answer after a long
# prompt pulls harder than the others. The same happens with microbatches, with the stages of a pipeline, and with sequences
# that are cut among ranks. The cure is the same everywhere: *add up losses, and divide by the number of valid targets of the
# global batch* (or by an n-th of it, where the gradients are then averaged over n ranks). `valid_targets`
# ([training/valid_targets.py](../training/valid_targets.py)) is ten lines: an all-reduce of one number, before the
# forward. To see it in a training: `make run ARGS='--ignore-first 40'`. Beside a wrapper of this
# workbook `loss_of` without that number refuses ignored targets; PyTorch's `F.cross_entropy` cannot know.
#
# ## "Twice the ranks, twice the learning rate"
#
# So far more ranks shared the *same* batch. In practice each new rank brings examples of its own: the **global batch** grows with
# the ranks, and a training on the same text has fewer steps. Must each step be larger, then? **A common belief**: "twice the ranks,
# twice the learning rate". There are two rules:
#
# - *Linear* (Goyal et al., 2017): a step with n times the examples takes the place of n steps, so it should go n times as far. That
#   is right for SGD, as long as the gradient hardly changes within these n steps.
# - *Square root* (Malladi et al., 2022): Adam divides by the size of the gradient, which is mostly noise in a small batch. The mean
#   over n times the examples has a √n times smaller noise, so Adam's steps may be √n times as long.
#
# Let us measure. A tiny GPT trains with AdamW on 1024 windows of 32 bytes of text, always the same ones. First one window is in each
# step, and each rank tries a learning rate alone. Then four windows are in a step, one for each rank. And last 16: each rank computes
# four of them, which gives the gradient that 16 ranks with one window each would have. (The wrapper is that of notebook 05. It gives
# the same gradients as the naive one, in one message.) **Predict**: if the batch is 16 times as large, how many times as large is the
# best learning rate?

# %%
rate = predict("The best learning rate is how many times as large?", example=16, unit="times")

# %%
# %%ranks
from data_parallel.train_bucket_overlap import BucketDataParallel
from lab.models.text import global_batch, load_corpus, split

WINDOWS, LENGTH = 1024, 32
text, held_out = split(load_corpus())
places = torch.arange(256)[:, None] * (len(held_out) // 257) + torch.arange(LENGTH + 1)
held_out = held_out[places].long()


def train_text(rate, windows, warmup=0):
    """Train on WINDOWS windows, with so many in a step; return the loss on held-out text.

    All ranks share a step, except one with a single window. The rate rises in the first `warmup` steps."""
    model = GPT(GPTConfig.named("tiny"))
    parallel = model if windows == 1 else BucketDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(WINDOWS // windows):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / (warmup + 1))
        x, y = global_batch(text, 0, step, windows, LENGTH)
        if windows > 1:
            x, y = (rank_slice(part, rank, world_size) for part in (x, y))
        optimizer.zero_grad()
        loss_of(parallel(x), y).backward()
        if windows > 1:
            parallel.finish_gradient_sync()
        optimizer.step()
    with torch.no_grad():
        return loss_of(model(held_out[:, :-1]), held_out[:, 1:]).item()


RATES = {1: [0.0005, 0.001, 0.002, 0.004], 4: [0.001, 0.002, 0.004, 0.008], 16: [0.002, 0.004, 0.008, 0.016]}
alone = train_text(RATES[1][rank], windows=1)

# %%
# %%ranks
together = {windows: [train_text(rate, windows) for rate in RATES[windows]] for windows in (4, 16)}

# %%
rates = pull("RATES", [0])[0]
losses = {1: list(pull("alone").values()), **pull("together", [0])[0]}
best = {windows: min(zip(losses[windows], rates[windows], strict=True))[1] for windows in rates}
print("best learning rate:", ", ".join(f"{best[windows]} with {windows} in a step" for windows in best))
rate.compare(round(best[16] / best[1], 2))

# %% [markdown]
# With AdamW on this text the rule of the square root holds: 4 times the windows, 2 times the rate; 16 times the windows, 4 times
# the rate. The linear rule would give 0.016 for 16 windows.
#
# One more thing can help: *warm-up*, a learning rate that rises in the first steps. At the start the weights are random, gradients
# are large and change quickly, and Adam's averages have seen few of them. So this is when a long step does most harm. The
# next cell tries the rates for 16 windows again, with a warm-up in the first 6 of 64 steps.

# %%
# %%ranks
warm = [train_text(rate, windows=16, warmup=6) for rate in RATES[16]]

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
lines = {f"{windows} in a step": (rates[windows], losses[windows]) for windows in rates}
lines["16 in a step, warm-up"] = rates[16], pull("warm", [0])[0]
styles = zip(("forward", "compute", "communication", "communication"), ("o-", "o-", "o-", "o--"), strict=True)
for (label, line), (color, style) in zip(lines.items(), styles, strict=True):
    axes.plot(*line, style, color=COLORS[color], label=label)
axes.set(xscale="log", xlabel="learning rate", ylabel="loss on held-out text, same training text")
ticks = sorted({*rates[1], *rates[16]})
axes.set_xticks(ticks, map(str, ticks))
axes.minorticks_off()
axes.legend(frameon=False)
show(
    figure,
    alt="Loss against the learning rate for 1, 4 and 16 windows in a step. The lowest point moves to the right by a factor of "
    "two from line to line, and upwards. With warm-up 16 windows have their lowest point at 0.008, and at 0.016 the loss is as high as without.",
)

# %% [markdown]
# Read three things from it. The lowest point moves to the right, by a factor of two from line to line. With warm-up 0.008 is as good
# as 0.004, so warm-up forgives a rate that is twice too large. It does not make the lowest loss lower here, and it does not save the
# linear rule: at 0.016 the loss is high with and without it. And the lowest point also moves *up*: the same text in 16 times
# fewer steps teaches the model less, and no learning rate of these mends that. So 16 ranks are not 16 times as fast to a given
# loss. Beyond some batch size, the *critical* one, more examples in a step hardly help (McCandlish et al., 2018). It grows in the
# course of a training, so some large trainings begin with smaller batches.
#
# This was one tiny model, one optimizer, one seed and 32,000 bytes of text. Measure again on your own model: try the square root for
# Adam, the linear rule for SGD with momentum, warm-up for both, and compare losses after the same number of *examples*.
#
# ## "Tokens per second went up"
#
# Of one rank, or of all ranks together? And which watch has measured it? To see the two traps, every rank gets a *metronome*
# instead of a model: a layer that sleeps for a fixed time and computes nothing ([lab/trace/metronome.py](../lab/trace/metronome.py)). So
# four ranks do not disturb each other on a laptop's few cores. Each rank takes its time twice: when its own backward has ended,
# and when `finish_gradient_sync()` has ended. First, all devices are equally fast.

# %%
# %%ranks
from lab.trace.metronome import Metronome


def speeds(seconds, steps=3):
    """Return the tokens per second of this rank by its own watch, and of the job. A forward takes `seconds`."""
    layer = torch.nn.Linear(8, 8)
    metronome = Metronome(layer, [list(layer.parameters())], seconds, vocab_size=256)
    parallel = NaiveDataParallel(metronome)
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    own, job = 0.0, 0.0
    dist.barrier()  # all watches start together
    for _ in range(steps):
        began = time.perf_counter()
        metronome.zero_grad()
        loss_of(parallel(tokens), tokens).backward()
        own += time.perf_counter() - began
        parallel.finish_gradient_sync()
        job += time.perf_counter() - began
    return steps * tokens.numel() / own, steps * tokens.numel() * world_size / job


rate, job_rate = speeds(seconds=0.1)
print(f"by this rank's watch {rate:.0f} tokens/s, of the job {job_rate:.0f} tokens/s")

# %% [markdown]
# The first trap: one run, and two numbers, one about four times the other. Both are called "tokens per second". Data parallel
# makes no rank faster. It makes the job faster, by a little less than the number of ranks. So a figure without "per device" or
# "of the job" says nothing, and a comparison of one kind with the other invents a speedup of n.
#
# The second trap is a *straggler*. Let the device of rank 3 be half as fast. **Predict**: each rank computes its tokens per
# second by its own watch, and you add the four numbers up. How many times the true speed of the job is that?

# %%
speed = predict("The sum of the four is how many times as fast as the job?", example=1, unit="times as fast")

# %%
# %%ranks
rate, job_rate = speeds(seconds=0.2 if rank == 3 else 0.1)
print(f"by this rank's watch {rate:.0f} tokens/s, of the job {job_rate:.0f} tokens/s")

# %%
speed.compare(sum(pull("rate").values()) / pull("job_rate")[0])

# %% [markdown]
# Three ranks at full speed and one at half speed seem to be worth 3.5 devices. In truth every step lasts as long as the
# slowest rank's, so the job is worth 4 devices at half speed, which is 2. The ratio is 3.5 / 2 = 1.75. Each rank's watch was
# right, and their sum is the speed of nothing. A rate of a job is: *all tokens of the global batch*, divided by the time
# between two moments that *all ranks* have reached. `tokens_per_second` in the report of every lesson is that
# ([lab/trace/meter.py](../lab/trace/meter.py)).
#
# A watch can also stop before the work is done. An asynchronous call returns when the work has been *started*:

# %%
# %%ranks
slow_link.use(slow_link.parse("100mbit,1ms"))
gradient = torch.ones(250_000)
began = time.perf_counter()
handle = all_reduce(gradient, async_op=True)
returned = time.perf_counter() - began
handle.wait()
done = time.perf_counter() - began
slow_link.use(None)
print(f"the call took {returned:.4f} s, the all-reduce {done:.4f} s")

# %% [markdown]
# On a GPU *every* operation is like that: a call only puts a kernel into a queue. So a step without
# `torch.cuda.synchronize()` before the watch stops seems to be wonderfully fast, until a line of the program reads the loss.
#
# ## The same with DDP
#
# PyTorch's own wrapper is `DistributedDataParallel`. Beside ours:
#
# | | ours | DDP |
# |---|---|---|
# | wrap | `parallel = NaiveDataParallel(model)` | `parallel = DistributedDataParallel(model)` |
# | equal weights | broadcast from rank 0 | the same |
# | step | `loss.backward()` | `loss.backward()`, which also sends and waits |
# | mean | `parallel.finish_gradient_sync()` | at the end of the backward |
# | several microbatches | nothing is sent before the end | all but the last inside `parallel.no_sync()` |
# | slices | `rank_slice`, `DistributedSampler` | `torch.utils.data.DistributedSampler` |

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

model = BabyCNN(seed=rank).double()
parallel = DistributedDataParallel(model)
x = rank_slice(images[:48], rank, world_size).double()
y = rank_slice(labels[:48], rank, world_size)
loss_of(parallel(x), y).backward()
from_ddp = {name: p.grad for name, p in model.named_parameters()}

# %%
assert_same(pull("from_ddp")[0], expected)
print(f"{len(expected)} gradients of DDP agree with those of one process.")

# %% [markdown]
# ## Exercises
#
# 1. **`sampler`** (20 minutes), if you have not written it after notebook 01: give each rank its share of the examples,
#    in each epoch another one. The file is `exercises/data_parallel/sampler.py`.
# 2. **`naive_gradient_sync`** (15 minutes): average the gradients, also where some ranks did not use a parameter. The
#    file is `exercises/data_parallel/naive_gradient_sync.py`, and `make exercises
#    ARGS='watch naive_gradient_sync'` grades it whenever you save it. Then **`open_naive`** (30 minutes): the whole class
#    from a specification, in `exercises/data_parallel/open_naive.py`.
# 3. **`accumulation`** (10 minutes): run the microbatches of a step, so that their gradients are those of the mean
#    loss. Write the function in a cell of its own, and let the lesson's tests grade it on real ranks. Leave the
#    division out once, and read what the checker says.
#
#    ```python
#    from exercises.notebook import check
#
#    def accumulate(model, parts, num_targets=None):
#        """Add up the gradients of the microbatches (x, y) in `parts`, and return the mean loss, without a graph.
#
#        The loss is the mean over `num_targets` targets, by default those of all microbatches: give them to `loss_of`."""
#        ...
#
#    check(accumulate);
#    ```
#
# **Find the bug**, after the last section of [the lesson's page](../data_parallel/README.md): `make exercises ARGS='bug
# bug_naive_b16'` makes a file with a wrong implementation, whose symptom is "the loss falls on each rank, but the replicas
# never agree". Find the mistake and correct it. Here, in a cell, that is `from exercises.notebook import bug` and
# `bug("bug_naive_b16")`.
#
# And with this notebook: change the straggler from half speed to a tenth, and predict the ratio before you run it.
# <details><summary>Answer</summary>The four watches add up to 3.1 devices, and the job is worth 4 devices at a tenth of
# the speed, which is 0.4. The ratio is 7.75.</details>
#
# ## Further reading
#
# - [train_naive.py](../data_parallel/train_naive.py), and [train_alone.py](../data_parallel/train_alone.py), where the
#   ranks do not talk at all: `make run RUN_MODE=train`
# - Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
#   https://arxiv.org/abs/2006.15704
# - Goyal et al., "Accurate, Large Minibatch SGD", 2017, https://arxiv.org/abs/1706.02677: the linear rule, and warm-up
# - Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022,
#   https://arxiv.org/abs/2205.10287: the rule of the square root
# - McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, https://arxiv.org/abs/1812.06162: the critical
#   batch size
#
# Next: [05 Overlap and buckets](05_overlap_and_buckets.ipynb), in which the gradients travel while the backward still
# computes.

# %%
# %ranks stop
