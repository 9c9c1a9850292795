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
# # 10 When it breaks
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/10_when_it_breaks.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** A training job hangs, dies, slows down, or trains something wrong. Many ranks are involved, and most of
# them are innocent. Which rank is it, which operation, and which line?
#
# In this notebook you break things on purpose, one by one, and each time you use the tool that finds the cause. You
# need about 40 minutes, and `predict` and `%%ranks` from [notebook 02](02_collectives.ipynb): a cell that begins with
# `%%ranks` runs on all ranks.
#
# Most of the broken functions run on ranks of their own: `run_ranks` starts them, ends them after a few seconds, and
# reports what it saw ([lab/ranks/__init__.py](../lab/ranks/__init__.py)). Such a function takes a `cluster`, which knows the rank and the
# number of ranks. `attempt` prints the report, without the Python traceback.

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

import os

# keeps the log lines of PyTorch's C++ code out of this page
os.environ |= {"TORCH_CPP_LOG_LEVEL": "FATAL", "KINETO_LOG_LEVEL": "99"}

# %load_ext lab.notebook
# %ranks 3

# %%
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lab.notebook.prediction import predict
from lab.ranks import RankError, run_ranks


def attempt(function, world_size, *arguments):
    """Run a function on ranks; print why it failed, and return whether it ended without an error."""
    try:
        run_ranks(function, world_size, *arguments, timeout=3)
    except RankError as error:
        first, *others = str(error).splitlines()
        is_hang = first.startswith("no answer")
        print(first, *(line for line in others if is_hang or re.match(r"\w+Error: ", line)), sep="\n")
        return False
    print("All ranks have ended without an error.")
    return True


# %% [markdown]
# ## A deadlock
#
# Four ranks pass a tensor around in a ring: each sends to the right, and receives from the left. If all of them send first,
# all wait: a `send` ends when its receiver has taken the message. **Predict**: of the four ranks, how many must receive
# first, so that the ring works?

# %%
receivers = predict("How many of the four ranks must receive first?", example=2)

# %%
def ring(cluster, receive_first):
    rank, n = cluster.rank, cluster.world_size
    mine, theirs = torch.ones(4), torch.empty(4)
    if rank < receive_first:
        dist.recv(theirs, src=(rank - 1) % n)
        dist.send(mine, dst=(rank + 1) % n)
    else:
        dist.send(mine, dst=(rank + 1) % n)
        dist.recv(theirs, src=(rank - 1) % n)


works = []
for receive_first in range(3):
    print(f"{receive_first} of 4 ranks receive first:")
    works.append(attempt(ring, 4, receive_first))

# %%
receivers.compare(works.index(True))

# %% [markdown]
# One is enough: it takes a message, so its left neighbour continues and receives, and so on around the ring. A deadlock
# is a *cycle* of ranks that wait for each other, and one rank that does not wait breaks it. (With `isend` and `irecv`
# none waits.)
#
# Look at the report of the first attempt. For each rank it has the line where the rank is, and the cycle. That is the
# first thing to ask in any hang: *where is each rank?* Outside of this workbook,
# [py-spy](https://github.com/benfred/py-spy) answers it for any Python process, without a change of the program. `pip
# install py-spy`, then `py-spy dump --pid PID` in a terminal. This is a dump of a rank that waits in an all-reduce.
# Read it from bottom to top: line 6 of the script called `train_step`, which waits in line 5.
#
# ```
# Process 26861: .venv/bin/python train.py
# Python v3.11.7
#
# Thread 26861 (idle): "MainThread"
#     all_reduce (torch/distributed/distributed_c10d.py:3252)
#     _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
#     train_step (train.py:5)
#     <module> (train.py:6)
# ```

# %% [markdown]
# And in a notebook there is the stop button. Try it when you have read to the end: run `%%ranks` with the line
# `dist.recv(torch.empty(4), src=(rank + 1) % 3)`, wait, and press stop. You get the line of each rank, and the ranks
# keep running.
#
# ## A different order
#
# All ranks of a group must call the same collectives in the same order. Here rank 1 makes one call too many, perhaps
# because of an `if rank == 1:` that was added for debugging.
#
# This time we use PyTorch's *flight recorder*. It keeps the last 2000 collectives of each rank in memory: the
# operation, the shapes, the line, and whether it has ended. `TORCH_FR_BUFFER_SIZE` sets another number. It does not
# write them to disk, though, and a rank that hangs cannot. So [lab/trace/black_box.py](../lab/trace/black_box.py) has a thread that
# writes them twice a second.

# %%
from lab.trace.black_box import black_box


def one_call_too_many(cluster, folder):
    with black_box(folder, cluster.rank):
        gradient = torch.ones(4)
        dist.all_reduce(gradient)
        if cluster.rank == 1:
            dist.broadcast(gradient, src=0)
        dist.all_reduce(gradient)


dumps = tempfile.mkdtemp()
attempt(one_call_too_many, 3, dumps);

# %% [markdown]
# The report names three lines, and all three look right. Which one is wrong? Each of the files has the history of a rank.
# [lab/trace/flight_recorder.py](../lab/trace/flight_recorder.py) lays them side by side, and finds the first collective at which the
# ranks differ. In a terminal it is `python -m lab.trace.flight_recorder FOLDER`.

# %%
from lab.trace.flight_recorder import analyse, load

print("\n".join(analyse(load(dumps))))

# %% [markdown]
# Collective 3, because `run_ranks` itself has begun with a barrier. (The analyser counts, as PyTorch does, for each
# group.) On GPUs PyTorch also writes nccl's history itself when a collective takes too long, if
# you set `TORCH_NCCL_DUMP_ON_TIMEOUT=1`. (Its own analyser for those files is `torchfrtrace`.) And a limit: gloo records
# collectives, but no `send` and `recv`. For those you have the line of each rank.
#
# The other remedy is to find the error when it happens. With `TORCH_DISTRIBUTED_DEBUG=DETAIL` each collective first
# compares what the ranks are about to do. It takes time, milliseconds for each call, so switch it on when you search:
# `TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...`. The variable must be set before the group is made; in the notebook we
# make a new group.

# %%
# %%ranks
from datetime import timedelta

dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does
careful = dist.new_group(timeout=timedelta(seconds=10))
dist.set_debug_level(dist.DebugLevel.OFF)


def try_it(collective):
    """Call a collective, and print the ranks and the difference from the error that it raises."""
    try:
        collective()
        print("no error")
    except RuntimeError as error:
        text = str(error)
        print(text[: text.index(".")] + ": " + text[text.rindex("aspects:") + len("aspects:") :].strip())


x = torch.ones(4)
if rank == 1:
    try_it(lambda: dist.broadcast(x, src=0, group=careful))
else:
    try_it(lambda: dist.all_reduce(x, group=careful))

# %% [markdown]
# An error on every rank, at once, instead of a hang. (The cell shows its beginning and its end. Between them the full
# message has, for two ranks, `CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE, TensorShape=[4],
# TensorDtypes=Float, ...)`. Look for that word in your logs.) But now a nastier case. Two ranks all-reduce two
# gradients: `a` is 1 on both ranks, and `b` is 10. Rank 0 reduces a and then b, rank 1 reduces b and then a.
# **Predict**: what is a on rank 0 afterwards? It should be 2.

# %%
swapped = predict("What is a on rank 0?", example=2)

# %%
# %%ranks
a, b = torch.tensor([1.0]), torch.tensor([10.0])
pair = dist.new_group([0, 1])
if rank < 2:
    for gradient in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(gradient, group=pair)
a.item(), b.item()

# %%
swapped.compare(pull("a.item()")[0])

# %% [markdown]
# 11: the first all-reduce has added rank 0's a and rank 1's b. No error, no hang, and `DETAIL` sees nothing either,
# because the operation and the shapes agree:

# %%
# %%ranks
a, b = torch.tensor([1.0]), torch.tensor([10.0])
for gradient in (b, a) if rank == 1 else (a, b):
    try_it(lambda: dist.all_reduce(gradient, group=careful))

# %% [markdown]
# Gradients become ready in an order that may differ from rank to rank, so
# data parallelism must agree on an order. That is why buckets are launched in one fixed order ([notebook
# 05](05_overlap_and_buckets.ipynb)).
#
# ## A different shape
#
# Rank 0 brings four numbers to an all-reduce, and rank 1 eight: a last batch that is smaller, or a vocabulary that was
# padded on one rank. **Predict**: how many of the two ranks can catch the error with `try`?

# %%
caught = predict("How many of the two ranks can catch an error?", example=2)

# %%
def different_shapes(cluster):
    try:
        dist.all_reduce(torch.ones(4 if cluster.rank == 0 else 8))
    except RuntimeError:
        return "caught"


try:
    results = run_ranks(different_shapes, 2, collect_failures=True)
except RankError as error:
    results = [error]
for rank, result in enumerate(results):
    print(f"result of rank {rank}: {result}")

# %%
caught.compare(results.count("caught"))

# %% [markdown]
# Rank 0 got no exception: its own C++ code has *ended the process* when more bytes arrived than it had room for. No
# `except` sees SIGABRT. Rank 1 only notices that its peer has gone: its error says `Connection closed by peer`, or
# `reset by peer`. So the rank with the Python traceback is not where it began. The cause is in the log of the other
# one: `Received data size doesn't match expected size`. (8 and 4 are bytes of one message here, not elements.) Look for
# the rank that died *first*.
#
# `DETAIL` turns this, too, into an error that can be read:

# %%
# %%ranks
try_it(lambda: dist.all_reduce(torch.ones(8 if rank == 1 else 4), group=careful))

# %% [markdown]
# A different dtype is worse. One rank brings the float 1.0, the other the integer 1. Both have four bytes. **Predict** the
# sum that rank 1 gets.

# %%
total = predict("What is 1.0 on rank 0 plus 1 on rank 1, on rank 1?", example=2)

# %%
# %%ranks
one = torch.ones(1, dtype=torch.int32 if rank == 1 else torch.float32)
if rank < 2:
    dist.all_reduce(one, group=pair)
one if rank < 2 else "rank 2 takes no part"

# %%
total.compare(pull("one.item()")[1])

# %% [markdown]
# A billion, and no error. The messages are bytes. The sum of this one number is made on rank 0, and then sent. Rank 0
# has read the bytes of the integer 1 as a float, which is almost zero, so the sum is 1.0. Rank 1 has read the bytes of
# this 1.0 as an integer. `DETAIL` refuses this, too:

# %%
# %%ranks
one = torch.ones(1, dtype=torch.int32 if rank == 1 else torch.float32)
try_it(lambda: dist.all_reduce(one, group=careful))

# %% [markdown]
# The workbook's own collectives send a header first, so they refuse it in a sentence
# ([comm/wire/handshake.py](../comm/wire/handshake.py)):

# %%
from comm import collectives


def different_dtypes(cluster):
    collectives.all_reduce(torch.ones(1, dtype=torch.int32 if cluster.rank == 1 else torch.float32))


try:
    run_ranks(different_dtypes, 2)
except RankError as error:
    print(re.search(r"The ranks do not fit together.*?dtype\.", str(error)).group())

# %% [markdown]
# ## A rank that left early
#
# Three ranks train, and rank 1's share of the data is one batch shorter. It leaves the loop. The others wait for it in the
# last all-reduce.

# %%
def uneven_shares(cluster, folder):
    batches = 3 if cluster.rank == 1 else 4
    with black_box(folder, cluster.rank):
        for _ in range(batches):
            dist.all_reduce(torch.ones(4))


dumps = tempfile.mkdtemp()
attempt(uneven_shares, 3, dumps)
print("\n".join(analyse(load(dumps))))

# %% [markdown]
# Both reports say it: rank 1 has finished, and the others wait. In the logs of a thousand ranks the silent one is hard to
# find, so PyTorch has a barrier that names who is missing. Put `monitored_barrier` where you suspect the difference. It
# works with gloo; a job on GPUs makes a second group, with gloo, for it.

# %%
# %%ranks
import time

checked = dist.new_group()  # after a timeout the connections of a group are closed, so we use one of its own
missing = ""
if rank != 1:
    try:
        dist.monitored_barrier(checked, timeout=timedelta(seconds=1), wait_all_ranks=True)
    except RuntimeError as error:
        missing = str(error).splitlines()[0]
missing

# %% [markdown]
# Rank 0 knows: it has asked all the others. The remedy here is a sampler that gives all ranks equally many batches
# (`drop_last=True`), or DDP's `join()`.
#
# And if a rank really dies? **Predict**: rank 1 is killed with SIGKILL in the middle of the training. The timeout of the
# group is 30 minutes. After how many seconds do the survivors know?

# %%
seconds = predict("After how many seconds do the survivors know?", example=1800, unit="s")

# %%
def one_is_killed(cluster):
    dist.all_reduce(torch.ones(4))
    start = time.perf_counter()
    if cluster.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        return time.perf_counter() - start, re.sub(r".*\] |\[.*", "", str(error))


survivor, killed, _ = run_ranks(one_is_killed, 3, collect_failures=True)
print(killed)
seconds.compare(survivor[0])

# %% [markdown]
# Almost at once: when a process dies, the kernel closes its connections. That is true of gloo and its TCP connections.
# With nccl the survivors may hang until PyTorch's watchdog ends them. A timeout is for ranks that do not come and say
# nothing: a deadlock, an endless loop, a machine that has lost its power. A dead process is the easy case.
#
# ## A straggler
#
# Nothing fails, but training is slow. Each step computes for 20 ms and all-reduces, and on rank 2 the computing takes
# 60 ms: a hot GPU, a slow disk, a neighbour on the same machine. The profiler of *rank 0* says: most of the time goes
# to the all-reduce. **A common belief**: "most of the time goes to the all-reduce, so the network is slow".
# **Predict**: how many ms does the all-reduce take on rank 2?

# %%
slow = predict("How many ms does the all-reduce take on rank 2?", example=40, unit="ms")

# %%
from comm.clocks import gather_events
from lab.trace import timeline
from lab.notebook.picture import show_events


def one_is_slow(cluster, folder):
    with black_box(folder, cluster.rank):
        timeline.start_recording()
        for step in range(20):
            with timeline.span("compute", "compute", step=step):
                time.sleep(0.06 if cluster.rank == 2 else 0.02)
            with timeline.span("all-reduce", "communication", step=step):
                dist.all_reduce(torch.ones(1000))
        timeline.stop_recording()
    waits = sorted(span.duration_ns / 1e6 for span in timeline.recorded() if span.name == "all-reduce")
    return gather_events(), waits[10]


dumps = tempfile.mkdtemp()
results = run_ranks(one_is_slow, 3, dumps)
show_events(
    [event for event in results[0][0] if 12 <= event.args["step"] < 20],
    alt="Eight steps on three ranks. Ranks 0 and 1 compute briefly and then spend two thirds of each step in the all-reduce. "
    "Rank 2 computes nearly all the time, and its all-reduces are thin lines.",
)
slow.compare(results[2][1])

# %% [markdown]
# The picture says it: communication *looks* slow where ranks are fast, because they wait. The rank to look at is the one
# that never waits. The flight recorder has seen it, too, since it notes when each rank calls:

# %%
[sentence] = analyse(load(dumps))
print(sentence.split(" It was")[0])  # the rest of the sentence says how late, and how often

# %% [markdown]
# ## PyTorch's profiler beside our timeline
#
# There is another picture of a step, and you will meet it everywhere: the trace of `torch.profiler`. It records each operator of
# *one* process. Let us record the same steps with both. Three ranks train BabyCNN with naive data parallel, where `pattern="torch"`
# means that PyTorch's own all-reduce sends the gradients, and rank 2 loses 100 ms in its forward. Our timeline notes forward,
# backward, eight all-reduces and the optimizer's step: 11 spans on each rank. **Predict**: how many does the profiler write down for
# the same step on rank 0, to the nearest hundred?

# %%
written = predict("How many spans does the profiler write?", example=100, unit="spans")

# %%
# %%ranks
from torch.profiler import ProfilerActivity, profile, record_function

from data_parallel.train_naive import NaiveDataParallel
from lab.models.digits import load_digits
from lab.models.model import BabyCNN, loss_of
from lab.trace import timeline

images, labels, *_ = load_digits()
x, y = images[rank * 64 : rank * 64 + 64], labels[rank * 64 : rank * 64 + 64]
parallel = NaiveDataParallel(BabyCNN(seed=0), pattern="torch")
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)


def step(late=0.0):
    with timeline.span("forward", "forward"), record_function("forward"):
        time.sleep(late)
        loss = loss_of(parallel(x), y)
    with timeline.span("backward", "backward"), record_function("backward"):
        optimizer.zero_grad()
        loss.backward()
    parallel.finish_gradient_sync()
    with timeline.span("step", "optimizer"), record_function("step"):
        optimizer.step()


step()  # the first one warms up
dist.barrier()
timeline.start_recording()
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    step(0.1 if rank == 2 else 0.0)
timeline.stop_recording()
ours = [event._replace(rank=rank) for event in timeline.recorded()]

# %%
numbers = pull("len(ours), len(profiler.events())")[0]
print(f"our timeline: {numbers[0]} spans")
written.compare(round(numbers[1], -2))

# %% [markdown]
# It writes down each operator, and each operator that this one calls. That has a price: a step of small operators takes longer while
# it is recorded. So compare the parts of a trace with each other, and measure the speed of a training without a profiler.
#
# Now read the trace of rank 0. `export_chrome_trace("rank_0.json")` would write it for [Perfetto](https://ui.perfetto.dev), and
# `key_averages()` adds it up by operator. Here its spans are drawn with the names that they have there: those that
# `record_function` has named, the outermost operators below them, and what gloo's own thread did. Above it is our timeline.

# %%
# %%ranks
from lab.trace.gantt import Event

NAMED = {"forward": "forward", "backward": "backward", "step": "optimizer"}


def spans_of(profiler):
    """Return the profiler's spans as events: the named ones, the operators directly below, and gloo's."""
    spans = []
    for one in profiler.events():
        parent = one.cpu_parent.name if one.cpu_parent else None
        if one.name in NAMED:
            lane, kind = "main", NAMED[one.name]
        elif one.name.startswith("gloo"):
            lane, kind = "gloo's thread", "communication"
        elif parent is None or parent in NAMED:
            lane, kind = "operators", "compute"
        else:
            continue
        start, end = (int(1000 * at) for at in (one.time_range.start, one.time_range.end))
        spans.append(Event(one.name, kind, start, end - start, lane))
    return spans


torchs = spans_of(profiler)

# %%
show_events(
    {
        "our timeline: three ranks, one clock": sum(pull("ours").values(), []),
        "torch.profiler: rank 0": pull("torchs")[0],
    },
    alt="Above, three ranks on our timeline: ranks 0 and 1 end forward and backward early and wait in the first all-reduce, rank 2 "
    "comes late. Below, the profiler's trace of rank 0: forward and backward with many operators, and a long gloo:all_reduce.",
)

# %% [markdown]
# Both show the same long first all-reduce, and each hides something:
#
# - In the profiler's trace gloo's work stands on a thread of its own, and `gloo:all_reduce` lasts from the call to the result, *with the
#   waiting*. Only the upper picture shows why: rank 2 comes late. A trace of one rank cannot tell a slow link from a slow peer.
# - Our timeline has one bar for the backward. Only the profiler says which operator takes the time. For a table of them, run a cell
#   with `%%rank 0` and `print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=5))`.
# - Each rank's trace has its own zero. `gather_events` ([comm/clocks.py](../comm/clocks.py)) measures the difference of the clocks
#   before it lays the ranks side by side. If you open several profiler traces together, compare lengths and not positions.
# - On a GPU the profiler has one row more, the kernels on the device. A long gap there means that the host is too slow, and a kernel
#   `ncclDevKernel_AllReduce` that is longer on *some* ranks means the same as above: those that wait.
#
# So ask the timeline *which rank*, and the profiler *which operator*.
#
# ## An unused parameter
#
# A model has two branches, and on rank 1 the batch takes the short one. The parameters of the other branch get no gradient
# there. DistributedDataParallel waits until *all* gradients are ready, so rank 1 never launches the last bucket.

# %%
class TwoBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)

    def forward(self, x, is_short):
        x = self.first(x)
        return x if is_short else self.second(x)


def unused_parameter(cluster, find_unused_parameters):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        TwoBranches(), find_unused_parameters=find_unused_parameters
    )
    for _ in range(2):
        loss = model(torch.ones(1, 2), is_short=cluster.rank == 1).sum()
        loss.backward()


try:
    run_ranks(unused_parameter, 2, False, timeout=10)
except RankError as error:
    names = re.search(r"Parameters which did not receive grad for rank.*", str(error))
    print(re.search(r"RuntimeError: .*?\.", str(error)).group(), names.group(), sep="\n")

# %% [markdown]
# The error comes in the *next* forward, and on the rank that is not waiting. Without `DETAIL` it has only the numbers of the
# parameters; with it, their names. `find_unused_parameters=True` costs a walk through the graph in each step, and works:

# %%
attempt(unused_parameter, 2, True);

# %% [markdown]
# [data_parallel/train_bucket_overlap.py](../data_parallel/train_bucket_overlap.py) shows how the ranks tell each other which
# parameters were used.
#
# ## A stale store after a restart
#
# Ranks find each other through a store: each writes its address under a key and reads those of the others ([notebook
# 01](01_ranks.ipynb)). A rank dies, and the launcher starts all ranks again, *with the same store*. Here a rank writes the port on which it listens.
# In the second attempt rank 1 starts half a second later than rank 0, as real processes do. **Predict**: of the two
# attempts, how many succeed?

# %%
successes = predict("How many of the two attempts succeed?", example=2)

# %%
import socket


def join(cluster, store_port, prefix, late):
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    store = dist.PrefixStore(prefix, store)
    if cluster.rank == 1:
        time.sleep(late)
        listener = socket.create_server(("127.0.0.1", 0))
        store.set("port of rank 1", str(listener.getsockname()[1]))
        listener.settimeout(2)
        try:
            listener.accept()
        except TimeoutError:
            return "rank 0 did not come"
        return "connected"
    port = int(store.get("port of rank 1"))  # waits until there is one
    try:
        socket.create_connection(("127.0.0.1", port))
        return "connected"
    except OSError as error:
        return type(error).__name__


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
attempts = [run_ranks(join, 2, store.port, "job", late, backend=None) for late in (0, 0.5)]
for number, attempt_of_ranks in enumerate(attempts):
    print(f"attempt {number}: {attempt_of_ranks}")

# %%
successes.compare(attempts.count(["connected", "connected"]))

# %% [markdown]
# The second time rank 0 does not wait: the key is there. It holds the port of a process that is dead. PyTorch's own
# groups meet in the same way, and then `init_process_group` hangs or fails, but only if one rank is faster than
# another. An error of the worst kind: it comes in some restarts, and not in others. The remedy is a prefix for each
# attempt, so that no rank can read an old key. `torchrun` tells each attempt its number, `TORCHELASTIC_RESTART_COUNT`
# ([comm/rendezvous.py](../comm/rendezvous.py)):

# %%
for number in (2, 3):
    print(f"attempt {number}:", run_ranks(join, 2, store.port, f"attempt_{number}", 0.5, backend=None))

# %% [markdown]
# ## A silent bug
#
# The last kind has no error, and hardly a symptom. Each rank seeds its random numbers with its rank, because the data
# should differ. The model is made afterwards. The gradients are averaged, as they should be, and the loss falls on
# every rank. The weights of rank 0 and rank 1 differ at the start by 1.000. **Predict** the difference after 200 steps
# with averaged gradients.

# %%
difference = predict("By how much do the weights differ after 200 steps?", example=0)

# %%
# %%ranks
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, float(rank))  # what a seed of its own does
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(rank)
losses = []
for step in range(200):
    x = torch.rand(8, 1)
    loss = (model(x) - 5 * x).pow(2).mean()  # the right weight is 5
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(model.weight.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.1f} -> {sum(losses[-20:]) / 20:.1f}, weight {model.weight.item():.3f}")

# %%
weights = pull("model.weight.item()")
difference.compare(weights[1] - weights[0])

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

figure, axes = plt.subplots(figsize=(6, 3))
for (rank, losses), color in zip(pull("losses").items(), ("forward", "backward", "communication"), strict=True):
    axes.plot(losses, color=COLORS[color], label=f"rank {rank}", linestyle=["-", "--", ":"][rank])
axes.set(xlabel="step", ylabel="loss (logarithmic)", yscale="log", ylim=(1e-4, 20))
axes.legend(frameon=False)
show(
    figure,
    alt="The losses of three ranks on a logarithmic axis. That of rank 0 falls to about 0.3 and stays there. That of rank 2 "
    "falls to nearly nothing at step 42 and rises again to 0.3. That of rank 1 falls below a thousandth.",
)

# %% [markdown]
# Still 1.000. All ranks make the same steps from different places, so averaged gradients never bring them together.
# Rank 2 even passes the right weight, and the mean gradient pushes it on. Rank 1 looks perfect, by luck. A log shows
# the loss of rank 0 as a rule, and alone that looks healthy: it falls from 7.5 to 0.3, and you do not know that 0 is
# possible. So do not judge by the loss. Compare the replicas themselves, bit by bit, once at the start and now and
# then:

# %%
# %%ranks
from training.report import replica_digests

print("replicas equal:", len(set(replica_digests(cluster, model))) == 1)

# %% [markdown]
# The remedy is a broadcast of the weights before the first step, as in
# [data_parallel/train_naive.py](../data_parallel/train_naive.py). The lessons' train scripts compare the replicas at
# the end of every run. `make exercises ARGS=bugs` lists more than a hundred wrong implementations by their symptoms.
# Most of them train, and the loss falls. Take one, find the line, and correct it.
#
# ## And the C++ underneath?
#
# Most of `torch.distributed` is C++. Where an error of PyTorch says too little, `TORCH_SHOW_CPP_STACKTRACES=1` adds
# where in the C++ code it was raised. PyTorch reads the variable when it is imported, so this takes a new process.

# %%
program = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    dist.broadcast(torch.ones(1), 3)
except RuntimeError as error:
    print("\\n".join(line[:110] for line in str(error).splitlines()[:2]))
"""
environment = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "1", "TORCH_DISABLE_ADDR2LINE": "1"}
print(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout)

# %% [markdown]
# ## What to do first
#
# | what you see | ask | tool |
# |---|---|---|
# | nothing moves | where is each rank? | the report of `run_ranks`, the stop button, `py-spy dump` |
# | nothing moves, and the lines look right | which collective was the first that differs? | flight recorder, `python -m lab.trace.flight_recorder` |
# | nothing moves, one rank is silent | who is missing? | `monitored_barrier` |
# | a rank was killed by SIGABRT, garbage in a sum | do shapes and dtypes agree? | `TORCH_DISTRIBUTED_DEBUG=DETAIL` |
# | "Connection closed by peer" | who died first? | the logs of all ranks, by time; the rank that has *no* such error |
# | slow | which rank never waits? | a timeline of all ranks on one clock, flight recorder |
# | it hangs only after a restart | does each attempt have its own keys? | the keys of the store |
# | the loss falls, and the model is bad | are the replicas equal, and the gradients those of one process? | digests, a test with one process |
#
# ## Exercises
#
# The exercise `send_and_receive` is the first section of this notebook, done right: every rank sends to the right and
# receives from the left, and none can deadlock. A *wire* sends and receives for this rank: `wire.isend(tensor, rank)`
# and `wire.irecv(tensor, rank)` start a message and return something that has `wait()`; `wire.rank` and `wire.size` say
# where you are. Write it, and uncomment the last line: `check` puts your function in the place of the lesson's, on
# every rank, and runs the lesson's tests.

# %%
from exercises.notebook import check


def shift(wire, outgoing, incoming):
    """Send `outgoing` to the right and receive `incoming` from the left. An empty tensor is not sent."""


# check(shift, "send_and_receive");

# %% [markdown]
# ## Further reading
#
# - [Flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html) and [debugging with
#   torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html#debugging-torch-distributed-applications)
# - Jiang et al., "MegaScale", 2024, [arXiv:2402.15627](https://arxiv.org/abs/2402.15627): stragglers and hangs on 12288
#   GPUs, and the tools that find them; Meta, "The Llama 3 Herd of Models", 2024,
#   [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.4: 419 unexpected interruptions in 54 days, and
#   their causes
# - [comm/README.md](../comm/README.md): what the workbook's own communication does when a rank fails
# - Next: [11 Long sequences](11_long_sequences.ipynb)

# %%
# %ranks stop
