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
# # 05 Overlap and buckets
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/05_overlap_and_buckets.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** In naive data parallel the link is idle while the ranks compute, and the ranks are idle while the link works.
# How do both work at the same time, and into how many messages should the gradients be packed?
#
# You need about 40 minutes. The lessons beside this notebook are [train_overlap.py](../data_parallel/train_overlap.py) and
# [train_bucket_overlap.py](../data_parallel/train_bucket_overlap.py). They have the solutions of exercises at the end, so read
# them after those. You should know why gradients are averaged (notebook 04).

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

# %load_ext lab.notebook
# %ranks 2

# %% [markdown]
# A cell that begins with `%%ranks` runs on both ranks at once, each a process of its own, and its variables stay there.
# `rank`, `world_size`, `torch` and `dist` (which is `torch.distributed`) are defined. The value of the last line is
# shown for each rank, and once for ranks that have the same one. All other cells run here, in the notebook's own
# process; `pull("x")` brings the ranks' `x` here, as a dictionary by rank.

# %%
import torch
from matplotlib import pyplot as plt

from lab.notebook.picture import COLORS, show, show_events
from lab.notebook.prediction import predict

# %% [markdown]
# ## What a hook is
#
# The backward computes the gradients of the last layer first, long before those of the first layer. So the last layer's
# gradients could travel while the rest is computed. But `loss.backward()` is one call that returns at the end. A
# **hook** is a function that autograd calls in the middle of it.
#
# A parameter has two kinds of hooks. The first is called *before* the new gradient is added to `.grad`, the second
# *after* that. Here is a parameter with both, and a second backward, as with two microbatches. **Predict**: in the
# second backward, the gradient is 3 in each of the two backwards. Which number does the first kind of hook get?

# %%
number = predict("Which number does the hook before accumulation get in the second backward?", example=6)

# %%
w = torch.tensor(1.0, requires_grad=True)
got = []
w.register_hook(lambda gradient: got.append(gradient.item()))
w.register_hook(lambda gradient: print(f"before accumulation: the hook gets {gradient}, w.grad is {w.grad}"))
w.register_post_accumulate_grad_hook(lambda w: print(f"after accumulation:  w.grad is {w.grad}"))
for microbatch in range(2):
    (3 * w).backward()

# %%
number.compare(got[1])

# %% [markdown]
# The hook before accumulation sees one microbatch's gradient only. A wrapper that sends once, after the last
# microbatch, and takes what this hook gets would lose all microbatches but the last. With one microbatch all its tests
# would pass. So the lessons use `register_post_accumulate_grad_hook`: when it is called, `.grad` is complete.
#
# ## "A hook that all-reduces overlaps communication"
#
# That is a common belief. Let us write such a hook. To see its effect on a laptop, every rank gets a *metronome*
# instead of a model: it has the parameters of a small GPT with four blocks, but sleeps 10 milliseconds in the forward
# of each block and 20 in the backward, as if each rank had a device of its own. The link is simulated, too: 400 Mbit/s,
# and a latency of one millisecond. A `span` records when its block of code began and ended, and `comm` records a span
# for each collective.

# %%
# %%ranks
import time

from comm.collectives import all_reduce
from comm.wire import slow_link
from lab.trace import timeline
from lab.trace.metronome import metronome_of
from lab.models.model import GPT, GPTConfig, loss_of
from lab.trace.overlap import overlap_of
from lab.trace.timeline import span

LINK = slow_link.parse("400mbit,1ms")


class BlockingHooks(torch.nn.Module):
    """Average each gradient in a hook, and wait for it there."""

    def __init__(self, module):
        super().__init__()
        self.module, self.handles = module, []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def forward(self, x):
        return self.module(x)

    def on_gradient(self, parameter):
        all_reduce(parameter.grad, op="mean")

    def finish_gradient_sync(self):
        """Do nothing: each hook has waited."""


def run(wrap, steps=4):
    """Run some steps; return the spans and the seconds of the shortest."""
    model = metronome_of(GPT(GPTConfig.named("small")), seconds=0.01)
    parallel, tokens = wrap(model), torch.zeros(4, 64, dtype=torch.int64)
    slow_link.use(LINK)
    runs = []
    for _ in range(steps):
        timeline.start_recording()
        began = time.perf_counter()
        model.zero_grad()
        with span("forward", "forward"):
            loss = loss_of(parallel(tokens), tokens)
        with span("backward", "backward"):
            loss.backward()
        parallel.finish_gradient_sync()
        seconds = time.perf_counter() - began
        timeline.stop_recording()
        runs.append((timeline.recorded(), seconds))
    slow_link.use(None)
    return min(runs, key=lambda one: one[1])


# %% [markdown]
# `overlap_of` computes from the recorded spans which share of the communication time was **hidden**: in that share the
# rank also computed. **Predict** the hidden share of the blocking hooks, as a number from 0 to 1. (The backward lasts
# 80 milliseconds. The gradients need about 70 milliseconds of the link's time. Each of the 68 all-reduces costs two
# latencies, 136 milliseconds together, and the ranks' own work for each message comes on top.)

# %%
share = predict("Which share of the communication do the hooks hide?", example=0.8)

# %%
# %%ranks
from data_parallel.train_naive import NaiveDataParallel

naive, naive_seconds = run(NaiveDataParallel)
blocking, blocking_seconds = run(BlockingHooks)
print(f"naive {naive_seconds:.2f} s a step, blocking hooks {blocking_seconds:.2f} s a step")

# %%
share.compare(pull("overlap_of(blocking).hidden_share")[0])

# %% [markdown]
# Nothing at all is hidden, and the step takes hardly less time than the naive one. The hook *is called* in the middle
# of the backward. But autograd runs one thing after the other: while the hook waits for its all-reduce, no gradient is
# computed. The communication has only moved to another place. You see it below. What runs *inside* a span, on the same
# thread, is drawn below it: the all-reduces now stand inside the backward, in four groups of one block each, and the
# backward has become as much longer.

# %%
show_events(
    {"naive": pull("naive")[0], "blocking hooks": pull("blocking")[0]},
    alt="Two timelines of one rank. Naive: forward, backward, then 68 all-reduces. Blocking hooks: the all-reduces "
    "stand inside the backward, which lasts as much longer, and the step takes as long.",
)

# %% [markdown]
# A profiler that shows one long bar "backward" makes this bug invisible: the communication lies within the time of the
# backward, and so it looks hidden. [lab/trace/overlap.py](../lab/trace/overlap.py) counts it as *blocking*.
#
# ## Asynchronous handles
#
# What is missing is a call that returns at once. With `async_op=True` a collective returns a **handle** while a
# communication thread does the work, and `handle.wait()` waits for its end. Until then the tensor belongs to the
# communication: do not read it, do not write to it.

# %%
# %%ranks
slow_link.use(LINK)
all_reduce(torch.ones(1), async_op=True).wait()  # the first asynchronous call starts the thread
dist.barrier()
gradients = [torch.ones(250_000) * (rank + 1) for _ in range(3)]
began = time.perf_counter()
handles = [all_reduce(gradient, op="mean", async_op=True) for gradient in gradients]
print(f"three all-reduces are under way after {time.perf_counter() - began:.3f} s")
for handle in handles:
    handle.wait()
print(f"all have ended after {time.perf_counter() - began:.3f} s")
slow_link.use(None)
[gradient[0].item() for gradient in gradients]

# %% [markdown]
# The three share one link, so they travel one after the other, in the order of the calls. But the calls returned long
# before, and the rank was free to do something else until the first `wait()`. Now the same in the hook. The wait moves
# to `finish_gradient_sync()`, which the training loop calls after the backward.


# %%
# %%ranks
class AsyncHooks(BlockingHooks):
    """Start to average each gradient in a hook, and wait for all of them after the backward."""

    def on_gradient(self, parameter):
        with span("launch", "launch", lane="launches"):
            self.handles.append(all_reduce(parameter.grad, op="mean", async_op=True))

    def finish_gradient_sync(self):
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


overlapped, overlapped_seconds = run(AsyncHooks)
hidden = overlap_of(overlapped)
print(f"{overlapped_seconds:.2f} s a step")
print(f"{hidden.hidden_seconds:.2f} s of {hidden.communication_seconds:.2f} s of communication are hidden")

# %%
show_events(
    {"blocking hooks": pull("blocking")[0], "asynchronous hooks": pull("overlapped")[0]},
    alt="Two timelines of one rank. With asynchronous hooks the backward is short again, and the all-reduces run below "
    "it on a lane of their own; they go on for a while after the backward, while the rank waits.",
)

# %% [markdown]
# The backward is as short as in the naive step, and the all-reduces run on another thread, so they have a *lane*, a
# row, of their own. The black marks are the *launches*, the calls in the hooks: each mark is the 17 of one block. The
# grey bars are what could not be hidden: the rank waits for the messages that have not arrived when the backward ends.
#
# Two things make the step shorter. Some communication is hidden. And no all-reduce has to wait for Python, because the
# next one is there when one ends. But only a small part is hidden: 68 messages need much more time than the backward.
# That is why the second half of this notebook packs them into buckets.
#
# The two classes above contain the idea, in 25 lines. [train_overlap.py](../data_parallel/train_overlap.py) has the
# same class with everything that a training needs besides. You will write that in the exercise `overlap_hooks` at the
# end; read the lesson after it. Two of these things deserve a look of their own, because without them a training goes
# wrong *silently*.
#
# ## Why the order must be agreed
#
# No message has a name. Ranks pair their collectives **by the order of the calls**: the first call of one rank with the
# first call of the other. Suppose that two parameters of equal size get their gradients in another order on rank 1,
# because its inputs took another branch of the model. Gradient `a` is 1 on both ranks, gradient `b` is 10 on both.
# **Predict**: rank 0 reduces `a`, then `b`; rank 1 reduces `b`, then `a`. What is the mean of `a` on rank 0?

# %%
mixed = predict("What is the mean of a on rank 0?", example=1)

# %%
# %%ranks
a, b = torch.tensor([1.0]), torch.tensor([10.0])
for gradient in (a, b) if rank == 0 else (b, a):
    all_reduce(gradient, op="mean")
print(f"a = {a.item()}, b = {b.item()}")

# %%
mixed.compare(pull("a.item()")[0])

# %% [markdown]
# No error, no warning, and both gradients are wrong: each is the mean of one rank's `a` and the other rank's `b`. If the
# sizes differ, the ranks at least notice it. `comm` sends a small header with each collective and compares them:

# %%
# %%ranks
from comm.errors import CommError

a, b = torch.ones(1), torch.ones(2)
try:
    for gradient in (a, b) if rank == 0 else (b, a):
        all_reduce(gradient, op="mean")
except CommError as error:
    print(error)

# %% [markdown]
# (`ring` is the algorithm that `comm` has chosen.) So all ranks need *one* order, which does not depend on
# what happens to be ready first. The lesson takes the reverse of the order in which parameters are registered, which is
# nearly the order of the backward. A gradient that is ready too early waits for those before it. You will write that in the
# exercise `launch_order`. This is what it does:
#
# | gradient is ready | launched |
# |---|---|
# | 0 | 0 |
# | 2 | |
# | 3 | |
# | 1 | 1, 2, 3 |
#
# ## A hook that captures its loop variable
#
# The next bug has been shipped by experts. Here are two models of three weights, `x * a * b * c`, one on each rank. Each gets
# a hook for each of its parameters, in a loop. Look at the `lambda`. **Predict**: how many of the three gradients are equal
# on both ranks after the backward?

# %%
equal = predict("How many of the three gradients are equal on both ranks?", example=3)


# %%
# %%ranks
class Three(torch.nn.Module):
    """Multiplies its input by three weights."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(1.0)))

    def forward(self, x):
        return x * self.a * self.b * self.c


def average(name, parameter):
    if parameter.grad is not None:
        all_reduce(parameter.grad, op="mean")
        averaged.append(name)


model, averaged = Three(), []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _: average(name, parameter))

model(torch.tensor(rank + 1.0)).backward()
gradients = {name: p.grad.item() for name, p in model.named_parameters()}
print(f"averaged: {averaged}")
gradients

# %%
by_rank = pull("gradients")
equal.compare(sum(by_rank[0][name] == by_rank[1][name] for name in "abc"))

# %% [markdown]
# All three hooks averaged `c`, and only the gradient of `c` is equal on both ranks. A Python function does not copy a
# variable of its surroundings, it looks it up *when it is called*. When the hooks are called, the loop is over, and
# `parameter` is the last one. Autograd passes the parameter to the hook, so the cure is to use what is passed, `lambda
# parameter: ...`, or to keep the value in a default argument, `lambda _, i=i: ...`, as the lesson does.
#
# What does a training with this bug look like? The same digits and the same network as in notebook 04:

# %%
# %%ranks
from lab.models.digits import load_digits
from lab.models.model import BabyCNN
from lab.models.text import rank_slice

images, labels, *_ = load_digits()


def train(register, steps=60, batch_size=64):
    """Return this rank's loss after each step, and the weights that it ends with."""
    model, losses = BabyCNN(seed=0), []
    register(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(steps):
        first = step * batch_size % (len(images) - batch_size)
        x = rank_slice(images[first : first + batch_size], rank, world_size)
        y = rank_slice(labels[first : first + batch_size], rank, world_size)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def captured(model):
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: average(name, parameter))


def passed(model):
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: average(name, parameter))


wrong, right = train(captured), train(passed)

# %%
wrong, right = pull("wrong"), pull("right")
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(right[0][0], color=COLORS["compute"], label="right, rank 0")
axes.plot(wrong[0][0], "--", color=COLORS["communication"], label="captured variable, rank 0")
axes.plot(wrong[1][0], ":", color=COLORS["optimizer"], label="captured variable, rank 1")
axes.set(xlabel="step", ylabel="loss of the rank's slice", ylim=(0, None))
axes.legend()
show(
    figure,
    alt="Three loss curves over 60 steps. All fall from 2.3 to below 1: the right training, and both ranks of the "
    "training with the bug.",
)
for what, runs in (("right", right), ("captured variable", wrong)):
    print(f"{what}: the replicas end with equal weights: {torch.equal(runs[0][1], runs[1][1])}")

# %% [markdown]
# The loss falls in all three curves. The wrong run trains two models, each on half of the data, and only the last bias is
# shared. At the end rank 0 saves its own. The loss does not show that; the question "are the replicas equal?" does, and every
# lesson asks it at the end of a run (`replicas_equal` in the report).
#
# ## Buckets: many gradients, one message
#
# The small GPT has 68 parameters, so 68 messages, each with its latency. It would be better to send several gradients
# together. The trick: `.grad` may be a **view**, a tensor that has no memory of its own and shows a part of another one.

# %%
flat = torch.zeros(6)
a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, 2))
a.grad, b.grad = flat[:2], flat[2:].view(2, 2)
(3 * a.sum() + 5 * b.sum()).backward()
flat

# %% [markdown]
# The backward has written both gradients into one flat tensor, a **bucket**. One all-reduce of `flat` would change both
# gradients at once, and nothing would have to be copied back:

# %%
flat *= 10  # as an all-reduce would, in place
b.grad

# %% [markdown]
# A bucket can be sent when *all* of its gradients are there. So it counts: it has a set of the gradients that are missing,
# each hook removes one, and when the set is empty, the bucket is launched. Here the lesson's class is at work, with two lines
# added that print. BabyCNN has four layers, and the bucket size is chosen so that each layer has a bucket of its own.

# %%
# %%ranks
from data_parallel.train_bucket_overlap import BucketDataParallel


class Talking(BucketDataParallel):
    """Says which gradient has come, and which bucket is launched."""

    def _on_gradient(self, parameter):
        self.line = f"{names[parameter]:14}"
        super()._on_gradient(parameter)
        if self.line:
            print(self.line)

    def _launch(self, bucket):
        number = next(i for i, one in enumerate(self.buckets) if one is bucket)
        print(f"{self.line} bucket {number} is complete: {bucket.flat.nbytes} bytes are sent")
        self.line = ""
        super()._launch(bucket)


model = BabyCNN(seed=rank)
names = {parameter: name for name, parameter in model.named_parameters()}
parallel = Talking(model, bucket_mb=0.004, first_mb=0.001)

# %%
# %%ranks
import contextlib
import io

with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(io.StringIO()):
    loss_of(parallel(images[:8]), labels[:8]).backward()
    parallel.finish_gradient_sync()

# %% [markdown]
# Last layer first; and three of the four buckets leave while the backward still has work to do. (A bucket takes
# gradients until it has its size, so the last one may make it larger, as `linear1.weight` does here. Within a layer
# autograd chooses the order.) The order of the buckets is a guess, the reverse of registration. DDP takes it in its first
# step only. After it, rank 0 sends to all ranks the order that it has seen, and all fill their buckets in that order from
# then on. That helps a model that registers its layers in another order than it runs them.
#
# ## How large should a bucket be?
#
# Small buckets: many messages, and each costs a latency. Large buckets: a bucket can leave only when its last gradient is
# there, and the last bucket, which is complete when the backward ends, can never be hidden. The GPT's gradients have 3.2
# MiB (a MiB is 1,048,576 bytes). **Predict**: which bucket size, in MiB, gives the shortest step on the link above?
#
# A measured answer would differ a little from run to run. So your prediction is compared with that of the formula, and
# the next cell measures beside it. The formula needs to know when each bucket is complete, and how long the link takes
# for it.

# %%
best = predict("Which bucket size gives the shortest step?", example=3.2, unit="MiB")

# %%
# %%ranks
from functools import partial

from comm import cost
from training.predict import step_seconds

SIZES = (0.015, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)  # MiB


def wire(num_bytes):
    """Return the seconds of an all-reduce on the simulated link, by the formula of notebook 03."""
    return cost.seconds("all_reduce", "ring", num_bytes, world_size, LINK)


def predicted_seconds(mb, first_mb=None, seconds=0.01):
    """Return a step's time by the formula: bucket k is sent when it is complete and bucket k-1 has arrived."""
    model = metronome_of(GPT(GPTConfig.named("small")), seconds)
    buckets = BucketDataParallel(model, bucket_mb=mb, first_mb=first_mb or mb).buckets
    done = {
        p: model.forward_seconds + 2 * seconds * (4 - i)
        for i, layer in enumerate(model.layers)
        for p in layer
    }
    messages = [(max(done[p] for p in bucket.views), bucket.flat.nbytes) for bucket in buckets]
    return step_seconds(model.forward_seconds + model.backward_seconds, 0.0, messages, wire)


predicted = {mb: predicted_seconds(mb) for mb in SIZES}
timed = {mb: run(partial(BucketDataParallel, bucket_mb=mb, first_mb=mb)) for mb in SIZES}

# %%
predicted = pull("predicted")[0]
best.compare(min(predicted, key=predicted.get), by="formula")

# %%
measured = pull("{mb: seconds for mb, (_, seconds) in timed.items()}")[0]
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
axes.plot(list(predicted), [1e3 * s for s in predicted.values()], color=COLORS["compute"], label="formula")
axes.plot(
    list(measured), [1e3 * s for s in measured.values()], "o", color=COLORS["communication"], label="measured"
)
axes.set(xscale="log", xlabel="bucket size (MiB, logarithmic)", ylabel="step (ms), from 100 on", ylim=(100, None))
axes.set_xticks(list(predicted), [f"{mb:g}" for mb in predicted])
axes.minorticks_off()
axes.legend()
show(
    figure,
    alt="Step time against bucket size, a U: long on the left, where latencies add up, shortest around half a MiB, "
    "and longer again on the right, where one bucket holds everything.",
)

# %% [markdown]
# It is a U. On the left you pay latencies (and in the measured points also this machine's own work for each message,
# which the formula leaves out). On the right you wait for a bucket that is complete too late. To pack everything into
# one message, 3.2 MiB, saves all latencies and hides *nothing*: the one bucket is complete when the backward ends. So
# most of the way from the naive step to the best one is *fewer messages*, and the rest, from the right end to the
# bottom of the U, is overlap. Where the bottom of the U lies depends on the link and on the model, so no default is
# right for all. DDP's is 25 MiB; `data_parallel/train_bucket_overlap.py` has `--bucket-mb`.
#
# The timelines show three sizes:

# %%
show_events(
    {f"buckets of {mb} MiB": pull(f"timed[{mb}][0]")[0] for mb in (0.06, 0.5, 4.0)},
    alt="Three timelines of one rank. Small buckets: many short all-reduces that go on after the backward. Half a "
    "MiB: six all-reduces, most of them during the backward. Four MiB: one all-reduce after the backward.",
)

# %% [markdown]
# The lesson has a refinement: its *first* bucket is small (0.25 MiB), so that the link starts early. A first bucket of 1 MiB
# is complete when the backward of two blocks has ended, and one of 0.25 MiB after one block, 20 milliseconds earlier. This
# is the step by the formula, with all other buckets of 1 MiB:

# %%
# %%ranks
{f"first bucket {mb} MiB": f"{1e3 * predicted_seconds(1.0, first_mb=mb):.1f} ms" for mb in (1.0, 0.25)}

# %% [markdown]
# ## Who waits at the end?
#
# After `loss.backward()` some messages are still under way, and the optimizer must not start before they have arrived.
# Our wrappers have a method that you call, `finish_gradient_sync()`. DDP has none. It uses a door that autograd leaves open:
# a hook can ask for a call at the end of the backward.

# %%
from torch.autograd import Variable

w = torch.tensor(1.0, requires_grad=True)


def on_gradient(w):
    print("hook: the gradient is complete, start to send")
    Variable._execution_engine.queue_callback(
        lambda: print("callback: the backward has ended, wait for the messages")
    )


w.register_post_accumulate_grad_hook(on_gradient)
(3 * w).backward()
print("backward() has returned")

# %% [markdown]
# The callback runs before `backward()` returns, so a loop that uses DDP looks like a loop on one device. That is
# comfortable, but you do not see any more at which moment you wait. In the lessons you see it. And what if you forget
# the call? Every rank would step with gradients that are still in flight. The wrapper notices that in the next backward:

# %%
# %%ranks
from lab.launch.errors import WorkbookError

parallel = BucketDataParallel(BabyCNN(seed=0))
loss_of(parallel(images[:8]), labels[:8]).backward()
try:
    loss_of(parallel(images[:8]), labels[:8]).backward()
except WorkbookError as error:
    print(error)
parallel.finish_gradient_sync()

# %% [markdown]
# ## Exercises
#
# 1. **`overlap_hooks`** (25 minutes): the launch in the hook, and the wait at the end, with unused parameters and
#    microbatches: `exercises/data_parallel/overlap_hooks.py`. `make exercises ARGS='watch
#    overlap_hooks'` grades it whenever you save it; one of its tests notices a hook that waits.
# 2. **`launch_order`** (20 minutes): launch in the agreed order, each gradient as early as possible. Write the hook in a
#    cell, and let the lesson's tests grade it on real ranks:
#
#    ```python
#    from exercises.notebook import check
#
#    def _on_gradient(self, parameter):
#        """Launch the parameters of the deque self._to_launch in its order; self._launch(parameter) launches one."""
#        if not self._guard.note_arrival(parameter) or not self._guard.is_synchronising:
#            return  # this is not the last microbatch
#        self._complete.add(parameter)
#        ...
#
#    check(_on_gradient, "launch_order");
#    ```
#
# 3. **`bucket_layout`** (20 minutes): which gradients share a bucket: `exercises/data_parallel/bucket_layout.py`. Then
#    **`bucket_views`** (25 minutes) and **`open_buckets`** (90 minutes): gradients that live in buckets,
#    and leave when the bucket is complete: `exercises/data_parallel/bucket_views.py`,
#    `exercises/data_parallel/open_buckets.py`.
#
# **Find the bug**, after the last section of [the lesson's page](../data_parallel/README.md): `make exercises ARGS='bug
# bug_bucket_overlap_b12'` makes a file with a wrong implementation, whose symptom is "replicas drift apart, and only on a
# slow network". Find the mistake and correct it. The hardest one of the lesson is `bug_overlap_047`: "with accumulation
# replicas drift apart". Its mistake takes several lines.
#
# And with this notebook: make the latency ten times as long (`LINK`), predict where the bottom of the U moves, and run
# the cells again.
# <details><summary>Answer</summary>All the way to the right. Each message costs more than 20 milliseconds now, so one
# message for everything gives the shortest step, although nothing of it is hidden.</details>
#
# ## Further reading
#
# - [train_overlap.py](../data_parallel/train_overlap.py),
#   [train_bucket_overlap.py](../data_parallel/train_bucket_overlap.py), and
#   [train_ddp.py](../data_parallel/train_ddp.py), whose docstring has DDP's code beside ours
# - [data_parallel/README.md](../data_parallel/README.md): step times beside DDP's, on three links
# - Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
#   https://arxiv.org/abs/2006.15704: section 3.2.3 has the order of buckets, and what happens without it
#
# Next: [06 ZeRO and FSDP](06_zero_and_fsdp.ipynb). All ranks still have all weights, all gradients and all of the
# optimizer's state, n times the same.

# %%
# %ranks stop
