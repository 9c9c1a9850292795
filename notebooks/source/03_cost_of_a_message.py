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
# # 03 Cost of a message
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/03_cost_of_a_message.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** An all-reduce can be done in many ways. Which one is the fastest, and can you say so before you run
# it?
#
# You need about 40 minutes. The lesson files beside this notebook are [comm/cost.py](../comm/cost.py), which has the
# formulas, and [comm/algorithms](../comm/algorithms), one file for each way. Notebook 02 has shown what an all-reduce
# is: each rank brings a tensor, and all ranks get the sum. The lesson files contain the solutions of the exercises, so do
# the exercises before you open them.

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
# ## One message
#
# Rank 0 sends a tensor to rank 1, which sends it back. This game is called *ping-pong*, and half of its time is the
# time of a message. (One could not simply look at the clocks of both ranks: the clocks of two machines do not agree
# to a microsecond.)
#
# **Predict**: a message of 4,000 bytes takes how many times as long as a message of 4 bytes?

# %%
larger_message = predict("4,000 bytes take how many", example=1000, unit="times as long")

# %%
# %%ranks
import time

from comm.point_to_point import recv, send


def ping_pong(num_bytes):
    """Return the seconds of a message between ranks 0 and 1: the fastest of several."""
    ball, times = torch.zeros(num_bytes // 4), []
    for _ in range(100 if num_bytes < 1 << 20 else 8):
        start = time.perf_counter()
        if rank == 0:
            send(ball, 1)
            recv(ball, 1)
        elif rank == 1:
            recv(ball, 0)
            send(ball, 0)
        times.append(time.perf_counter() - start)
    return min(times) / 2


SIZES = [4, 64, 1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000, 4_000_000, 16_000_000]
ping_pong(4)  # the first messages make the connection, and are slower
times = [ping_pong(size) for size in SIZES]

# %%
sizes, times = pull("SIZES")[0], pull("times")[0]
larger_message.compare(times[sizes.index(4_000)] / times[0])

# %% [markdown]
# A thousand times the bytes take about as long. A message has a price that does not depend on its size: system calls,
# waking up the receiver, and on a network the way through cards and switches. Hockney (1994) put this into two
# numbers. A message of b bytes takes
#
# ```
# alpha + b * beta
# ```
#
# seconds. *alpha* is the latency, the time of an empty message. *beta* is the time of a byte, so 1/beta is the
# bandwidth. Here are the two for this machine. alpha is the time of the smallest message, and beta comes from the
# largest one:

# %%
alpha = times[0]
beta = (times[-1] - alpha) / sizes[-1]
print(f"alpha {alpha * 1e6:.1f} us for each message")
print(f"beta  {beta * 1e9:.4f} ns for each byte, so {1e-9 / beta:.2f} GB/s")


# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show, show_events

figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.loglog(sizes, times, "o", color=COLORS["communication"], label="measured")
line = [4 * 1.2**i for i in range(85)]
axes.loglog(line, [alpha + size * beta for size in line], "-", color=COLORS["compute"], label="alpha + bytes * beta")
axes.axvline(alpha / beta, color="black", linestyle=":")
axes.text(alpha / beta, times[-1], " alpha / beta", va="center")
axes.set(xlabel="bytes of the message", ylabel="seconds")
axes.grid(alpha=0.3)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
show(
    figure,
    alt="Time of a message against its size, both on logarithmic scales. The measured points follow the line of the "
    "model roughly: flat on the left of alpha / beta, and rising in proportion to the size on the right.",
)

# %% [markdown]
# The picture has two halves. On the left, in the *latency regime*, the time is alpha, and the bytes cost nothing. On
# the right, in the *bandwidth regime*, the time is proportional to the bytes, and alpha does not matter. The border
# is where both terms are equal, at alpha/beta bytes. On this machine that is a large message already. So the first
# rule of communication is: **send few large messages instead of many small ones**. Notebook 05 builds buckets out of
# this rule.
#
# The points need not lie exactly on the line. Ranks of one machine send through shared memory, where a message that fits
# into the processor's cache is faster than the line says. Real links have steps, too, for example where a message no
# longer fits into a buffer. (That is also why notebook 00 found another bandwidth: it sent 32 MB, and took the middle one
# of several times. Here it is the shortest.) Two numbers are a coarse model. Are they good enough to choose an algorithm?
#
# ## A network for each rank
#
# From here on we need a network on which every rank has a link of its own. Loopback is not like that: all ranks share
# the memory and the few cores of one machine. So the next cell simulates one. The tensors travel as before, but each
# message carries the time at which it left, and its receiver sleeps until alpha + bytes * beta later. A rank's link
# sends one message after the other, and receives one after the other. You need not read the code: it has `isend` and
# `irecv`, which start a message and return at once, and `wait`, which returns when the message has arrived. Nothing
# else is in the simulation: it knows nothing about all-reduces and their formulas. Our link has a latency of 10 ms and
# carries 100 Mbit/s. These are slow, so that the simulation is much slower than your machine.

# %%
# %%ranks
from comm.cost import Link
from comm.wire.wire import peer_wire
from lab.trace import timeline

LINK = Link(alpha=10e-3, beta=8 / 100e6)  # seconds for each message, seconds for each byte
now = timeline.now  # nanoseconds


class SlowWire:
    """Sends and receives the messages of one all-reduce as slowly as LINK."""

    def __init__(self, group=None):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.payloads = peer_wire(group)
        self.notes = peer_wire(group, counted=False)  # say when each message has left
        self.can_send, self.can_receive = now(), now()  # when this rank's link is free again

    def isend(self, tensor, peer):
        leaves = max(now(), self.can_send)
        self.can_send = leaves + takes(tensor)
        note = self.notes.isend(torch.tensor([leaves]), peer)
        return SlowMessage(self, self.payloads.isend(tensor, peer), note, None)

    def irecv(self, tensor, peer):
        note = self.notes.irecv(torch.zeros(1, dtype=torch.int64), peer)
        return SlowMessage(self, self.payloads.irecv(tensor, peer), note, peer)


class SlowMessage:
    def __init__(self, wire, payload, note, sender):
        self.wire, self.payload, self.note, self.sender = wire, payload, note, sender
        self.tensor = payload.tensor

    def wait(self):
        self.payload.wait(), self.note.wait()
        start = self.note.tensor.item()
        if self.sender is not None:
            start = max(start + int(LINK.alpha * 1e9), self.wire.can_receive)
            self.wire.can_receive = start + takes(self.tensor)
        end = start + takes(self.tensor)
        time.sleep(max(0, end - now()) / 1e9)
        if self.sender is not None:
            timeline.record(f"{self.sender}", "communication", start, end)


def takes(tensor):
    return int(tensor.nbytes * LINK.beta * 1e9)


# %% [markdown]
# ## Four ways to do an all-reduce
#
# | way | who sends what | file (after the exercises) |
# |---|---|---|
# | star (`flat` in the code) | all send to rank 0, which adds up and sends the sum to all | [star.py](../comm/algorithms/star.py) |
# | tree | pairs add up, then pairs of pairs, ... and the sum goes back down | [tree.py](../comm/algorithms/tree.py) |
# | ring | the tensor is cut into n chunks; each rank always sends to its right neighbour | [ring.py](../comm/algorithms/ring.py) |
# | hypercube | in each round a rank exchanges with the partner whose number differs in one bit | [hypercube.py](../comm/algorithms/hypercube.py) |
#
# The hypercube has two forms. In *recursive doubling* partners exchange the full tensor. In *halving-doubling* they
# exchange halves, then quarters, and so on, and then all of it again in the other direction. Take four ranks and four
# numbers. First ranks 0 and 2 exchange halves: rank 0 adds up the first two numbers, rank 2 the last two. Ranks 1 and 3
# do the same. Then ranks 0 and 1 exchange one number each: rank 0 has the first number of all four ranks, rank 1 the
# second. Rank 2 has the third, rank 3 the last. On the way back they exchange what is complete: first single numbers,
# then halves.
#
# Watch them. Four ranks add up a tensor whose bytes take 20 ms on the link. A bar is a time in which bytes arrive at
# a rank, and the number on it is the sender. A gap is latency, or waiting. The clock starts with the first byte that
# arrives.

# %%
# %%ranks
from comm.algorithms import hypercube, ring, star, tree

WAYS = {
    "flat": star.all_reduce,
    "tree": tree.all_reduce,
    "ring": ring.all_reduce,
    "recursive_doubling": hypercube.recursive_doubling,
    "halving_doubling": hypercube.halving_doubling,
}
GROUPS = {n: dist.new_group(list(range(n))) for n in (2, 4, 6, 8)}


def run(way, num_bytes, n=8):
    """Return the seconds of one all-reduce among n ranks on this rank."""
    x = torch.ones(num_bytes // 4)
    dist.barrier(GROUPS[n])
    start = now()
    WAYS[way](SlowWire(GROUPS[n]), x, "sum")
    assert x.eq(n).all(), "the sum of n ones is n"
    return (now() - start) / 1e9


def draw(way, num_bytes, n):
    timeline.start_recording()
    run(way, num_bytes, n)
    timeline.stop_recording()
    return [event._replace(rank=rank) for event in timeline.recorded()]


events = {}
if rank < 4:
    for way in WAYS:
        run(way, 8, 4)  # the first messages of a group make its connections
        events[way] = draw(way, 256_000, 4)

# %%
by_rank = pull("events", ranks=range(4))
show_events(
    {way: sum((by_rank[rank][way] for rank in range(4)), []) for way in by_rank[0]},
    alt="Five timelines of four ranks. Flat: rank 0 receives three full tensors one after the other, then the others "
    "wait for their copies. Tree: four rounds with full tensors. Ring: six rounds of short messages on all ranks at "
    "once. Recursive doubling: two rounds with full tensors on all ranks. Halving-doubling: four rounds of halves and "
    "quarters.",
)

# %% [markdown]
# Look for two things in each picture. *How many messages wait for another message?* A message that can leave only after
# another one has arrived costs one more alpha. In the first half of the star three bars follow one another on rank 0,
# but the three messages have left at the same time, so together they cost one alpha. *How long are the bars of the
# busiest rank together?* That is the cost of the bytes. So the star takes 2 (10 + 3 · 20.5) = 143 ms. In the picture it
# ends near 133, because the first alpha is before the first byte. With n ranks, B bytes, and L = log2 n rounded up, you
# can read off:
#
# | way | seconds |
# |---|---|
# | star | 2 (alpha + (n-1) B beta) |
# | tree | 2 L (alpha + B beta) |
# | ring | 2 (n-1) (alpha + B/n beta) |
# | recursive doubling | L (alpha + B beta) |
# | halving-doubling | 2 L alpha + 2 (n-1)/n B beta |
#
# The last two hold if n is a power of two. Here they are as a function, for the cases that we need. In comm/cost.py
# it is called `seconds`.

# %%
import math


def predicted(way, num_bytes, n, alpha=10e-3, beta=8e-8):
    B, rounds = num_bytes * beta, math.ceil(math.log2(n))
    below = 2 ** math.floor(math.log2(n))  # the largest power of two that is not above n
    folds = 0 if below == n else 2  # other ranks first hand their tensor to a partner, and get the sum back at the end
    return {
        "flat": 2 * (alpha + (n - 1) * B),
        "tree": 2 * rounds * (alpha + B),
        "ring": 2 * (n - 1) * (alpha + B / n),
        "recursive_doubling": (math.log2(below) + folds) * (alpha + B),
        "halving_doubling": 2 * math.log2(below) * alpha + 2 * (below - 1) / below * B + folds * (alpha + B),
    }[way]


# %% [markdown]
# ## Who wins, with 8 ranks?
#
# Take a pencil. For 8 ranks, alpha = 10 ms, and tensors of 8 bytes, 64 KB and 1.5 MB, whose bytes take 0, 5 and 120
# ms: which way is the fastest? It is a different one each time. **Predict** one number of it: for 8 bytes, the ring
# takes how many times as long as the star?

# %%
ring_against_star = predict("For 8 bytes the ring takes how many", example=1, unit="times as long")

# %%
# %%ranks
TESTED = [8, 64_000, 1_500_000]
seconds = {}
for num_bytes in TESTED:
    for way in WAYS:
        run(way, 8)  # the first message between two ranks makes their connection
        repeats = 1 if way in ("flat", "tree") and num_bytes > 1e6 else 3  # these two take seconds
        seconds[way, num_bytes] = [run(way, num_bytes) for _ in range(repeats)]


# %%
def slowest_rank(name):
    """Return the time of each all-reduce: that of its slowest rank, and of several runs the fastest."""
    by_rank = [times for times in pull(name).values() if times]
    return {case: min(map(max, zip(*(times[case] for times in by_rank)))) for case in by_rank[0]}


measured = slowest_rank("seconds")
ways, tested = pull("list(WAYS)")[0], pull("TESTED")[0]
for num_bytes in tested:
    print(f"{num_bytes:,} bytes on 8 ranks")
    for way in ways:
        time_here, formula = measured[way, num_bytes], predicted(way, num_bytes, 8)
        print(f"    {way:<20} predicted {formula * 1e3:6.1f} ms   measured {time_here * 1e3:6.1f} ms")
    print(f"    fastest: predicted {min(ways, key=lambda way: predicted(way, num_bytes, 8))}, ", end="")
    print(f"measured {min(ways, key=lambda way: measured[way, num_bytes])}")

# %%
ring_against_star.compare(measured["ring", 8] / measured["flat", 8])

# %%
STYLES = {"flat": ("o", "data"), "tree": ("s", "backward"), "ring": ("^", "communication")}
STYLES |= {"recursive_doubling": ("D", "forward"), "halving_doubling": ("v", "optimizer")}
line = [8 * 1.25**i for i in range(57)]
figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
for way, (marker, kind) in STYLES.items():
    axes.loglog(line, [predicted(way, size, 8) * 1e3 for size in line], color=COLORS[kind])
    points = [measured[way, size] * 1e3 for size in tested]
    axes.loglog(tested, points, marker, color=COLORS[kind], fillstyle="none", markeredgewidth=2, label=way, markersize=9)
axes.set(xlabel="bytes of the tensor", ylabel="ms", title="8 ranks: lines are predicted, points are measured")
axes.grid(alpha=0.3)
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
show(
    figure,
    alt="Time of an all-reduce on 8 ranks against the size of the tensor, a line and three measured points for each "
    "way. The points lie near their lines. Flat is the lowest on the left and the highest on the right. Recursive "
    "doubling is the lowest in the middle, halving-doubling on the right, and the ring comes near to it.",
)

# %% [markdown]
# Three sizes, three winners, and the formulas knew all of them. (Each message of the simulation costs alpha + bytes ·
# beta, as in the model. What the run tests is whether the formulas count right: which messages wait for which. The
# points lie above the lines, most of all for the shortest times, because your machine needs time for each message,
# too.) And by the formulas the ring takes 7 times as long as the star for 8 bytes: 14 latencies against 2.
#
# - **Tiny tensors**: only the number of messages that follow one another counts. The star needs two, one up and one
#   down, because the latencies of messages to different ranks overlap. The ring needs 14.
# - **Middle sizes**: the star's centre has to receive all tensors, and that becomes expensive. Recursive doubling
#   needs only three rounds.
# - **Large tensors**: only the bytes of the busiest rank count. Halving-doubling and the ring send the least.
#
# ## 2 (n-1)/n
#
# How many bytes does the busiest rank send? This can be counted exactly. **Predict**: 1 MB is added up by 8 ranks in
# a ring. How many MB does a rank send?

# %%
ring_bytes = predict("How many MB does a rank of 8 send in a ring?", example=7, unit="MB")

# %%
# %%ranks
from lab.trace.ledger import LEDGER

sent = {}
LINK = Link(alpha=0, beta=0)  # the bytes are the same on a fast link
for way in WAYS:
    before = LEDGER.total()
    run(way, 1_000_000)
    traffic = LEDGER.total() - before
    sent[way] = (traffic.bytes_sent / 1e6, traffic.messages_sent)
LINK = Link(alpha=10e-3, beta=8 / 100e6)

# %%
from comm.cost import traffic

print(f"{'busiest of 8 ranks':<22}{'MB sent':>8}{'by formula':>12}{'messages':>10}")
by_rank = pull("sent")
for way in ways:
    most, messages = max(by_rank[rank][way] for rank in range(8))
    formula = max(traffic("all_reduce", way, 250_000, 4, 8, rank).bytes_sent for rank in range(8)) / 1e6
    print(f"{way:<22}{most:>8.2f}{formula:>12.2f}{messages:>10}")
ring_bytes.compare(by_rank[0]["ring"][0])

# %% [markdown]
# A rank of a ring sends 2 (n-1)/n times the tensor: 1.75 MB with 8 ranks, and by the formula 1.998 MB with 1000. It
# never reaches twice the tensor. If all ranks send the same amount, no algorithm sends less (Patarasu and Yuan, 2009).
# Such an algorithm is called *bandwidth-optimal*. The star's centre sends seven tensors here, and with 1000 ranks it
# would send 999.
#
# ## Does an all-reduce become slower with more ranks?
#
# **A common belief**: "with four times the ranks, an all-reduce takes four times as long", because there is four times
# as much to add up. Two ranks add up 4 MB in a ring on a link of 100 Mbit/s, with hardly any latency. **Predict**:
# eight ranks take how many times as long?

# %%
more_ranks = predict("Eight ranks take how many", example=4, unit="times as long")

# %%
# %%ranks
LINK = Link(alpha=0.2e-3, beta=8 / 100e6)
seconds = {}
for n in (2, 4, 8):
    if rank < n:
        run("ring", 8, n)
        seconds[n] = [run("ring", 4_000_000, n) for _ in range(2)]
LINK = Link(alpha=10e-3, beta=8 / 100e6)

# %%
by_rank = pull("seconds")
time_of = {n: min(map(max, zip(*(by_rank[rank][n] for rank in range(n))))) for n in (2, 4, 8)}
more_ranks.compare(time_of[8] / time_of[2])

# %% [markdown]
# Less than twice as long: from 2 (2-1)/2 = 1 to 2 (8-1)/8 = 1.75 times the tensor. With any number of ranks it stays
# below twice, as long as the latencies do not count.
#
# This makes it hard to judge a measurement. If someone reports "4 MB in 0.6 s", is that good? Bytes divided by
# seconds, the *algorithm bandwidth*, falls with the number of ranks, even on a perfect network. So NVIDIA's tests
# (nccl-tests) multiply it by 2 (n-1)/n and call the result *bus bandwidth*. It can be compared with the data sheet of
# the link, whatever the number of ranks:

# %%
for n, took in time_of.items():
    algorithm = 4e6 * 8 / took / 1e6
    print(f"{n} ranks: {took * 1e3:5.1f} ms, algorithm bandwidth {algorithm:5.1f} Mbit/s, "
          f"bus bandwidth {algorithm * 2 * (n - 1) / n:5.1f} Mbit/s")

# %% [markdown]
# The bus bandwidth is close to 100 Mbit/s, the speed of the link, for every number of ranks. (What is missing with
# eight ranks is the time that your machine itself needs for 14 messages in a row.) In a report about your cluster look
# for this number.
#
# ## Why, then, does everyone talk about rings?
#
# In the run with 8 ranks halving-doubling was the best for large tensors, and the ring was second. Still the ring is
# what the libraries for training began with. One reason shows with 6 ranks. **Predict**: halving-doubling with 6
# ranks takes how many times as long as with 8? (1.5 MB, and a latency of 10 ms. Six ranks have less to add up.)

# %%
six_ranks = predict("With 6 ranks halving-doubling takes how many", example=0.75, unit="times as long")

# %%
# %%ranks
LARGE = 1_500_000
seconds = {}
if rank < 6:
    for way in ("ring", "recursive_doubling", "halving_doubling"):
        run(way, 8, 6)
        seconds[way, LARGE] = [run(way, LARGE, 6) for _ in range(3)]

# %%
of_six = slowest_rank("seconds")
for (way, size), took in of_six.items():
    print(f"{way:<20} predicted {predicted(way, size, 6) * 1e3:6.1f} ms   measured {took * 1e3:6.1f} ms")
(way, large) = min(of_six, key=of_six.get)
print(f"fastest: {way}")
six_ranks.compare(of_six["halving_doubling", large] / measured["halving_doubling", large])

# %% [markdown]
# Fewer ranks, and it is slower. A hypercube exists only for 2, 4, 8, 16, ... ranks. With six, two ranks first hand
# their full tensor to a partner, and get the full sum back at the end. That costs two messages with all bytes. The
# ring does not care about the number of ranks, and wins.
#
# Its other advantage is not in our simulation. In a ring each rank talks to the same neighbour all the time, so the
# ring can be laid along the fast links of a machine. In a hypercube partners are far apart, and their messages share
# the cables between machines. For thousands of ranks, where 2 (n-1) latencies are too many, libraries take trees
# again, two at once so that every link is busy (Jeaugey, 2019). All of them choose by size: measure alpha and beta,
# compute the formulas, take the smallest. That is what you have done here.
#
# ## And on loopback?
#
# What is left is the real link of this notebook. The same formulas predict the time of a ring on loopback from the
# measured alpha and beta. **Predict**: 1 MB among eight ranks takes how many times as long as the formula says?

# %%
real_link = predict("On loopback the ring takes how many", example=1, unit="times as long")

# %%
# %%ranks
from comm import collectives
from comm.transport.choice import use_transport

seconds = {}
for num_bytes in (4_000, 1_000_000):
    for transport in ("gloo", "auto"):
        use_transport(transport)
        runs = seconds[transport, num_bytes] = []
        for _ in range(6):
            dist.barrier()
            start = time.perf_counter()
            collectives.all_reduce(torch.ones(num_bytes // 4), pattern="ring")
            runs.append(time.perf_counter() - start)

# %%
loopback = slowest_rank("seconds")
for num_bytes in (4_000, 1_000_000):
    formula = predicted("ring", num_bytes, 8, alpha, beta)
    times = [f"{loopback[transport, num_bytes] * 1e3:5.2f} ms" for transport in ("gloo", "auto")]
    print(f"{num_bytes:>9,} bytes: ring predicted {formula * 1e3:5.2f} ms, measured {times[0]} (gloo), {times[1]} (auto)")
real_link.compare(loopback["auto", 1_000_000] / predicted("ring", 1_000_000, 8, alpha, beta))

# %% [markdown]
# On a laptop with few cores the ring takes many times as long as predicted. The model assumes that all eight ranks send at
# the same time, each over a link of its own. Here all of them share the same cores, so they take turns: in each of 14
# steps eight processes wake up, one after the other. The formula is right, and its assumption is not. Before you trust a
# model, ask what is shared. (With the transport `auto` both the ring and the messages that measured alpha and beta travel
# through shared memory, where the system has it. That copies less and wakes fewer threads than gloo's sockets. So it is
# what the workbook's trainings use.)
#
# ## Exercises
#
# 1. Write the winner for large tensors: `halving_doubling` (45 minutes). The ring is three exercises of notebook 02.
# 2. Write the formulas: the exercise `predicted_seconds`
#    (`exercises/comm/predicted_seconds.py`, 40 minutes). Check it with `make
#    exercises ARGS='check predicted_seconds'`, or in a cell:
#    ```python
#    from exercises.notebook import check
#
#    def seconds(op, pattern, num_bytes, ranks, link):
#        ...
#
#    check(seconds, "predicted_seconds");
#    ```
# 3. With a pencil: 1000 ranks, alpha = 10 us, 50 GB/s, a tensor of 1 GB. What do the ring and the tree take? And for
#    1 KB?
#    <details><summary>Answer</summary>1 GB takes 20 ms on the link. Ring: 1998 * (10 us + 0.02 ms) = 60 ms. Tree:
#    20 * (10 us + 20 ms) = 400 ms. For 1 KB the bytes cost nothing. Ring: 20 ms. Tree: 0.2 ms.</details>
#
#    Or change `SlowWire` so that a link cannot send and receive at the same time. Which way suffers most?
#    Predict before you run.
#    <details><summary>Answer</summary>The ring and both hypercubes: there a rank sends and receives at once, so the
#    bytes take twice as long. The star hardly changes, because its centre first only receives, and then only
#    sends.</details>
#
# ## Further reading
#
# - Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", 1994: alpha and beta
# - Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005: all of these
#   ways, and when to take which
# - Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009
# - [nccl-tests, PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): bus bandwidth
# - Jeaugey, [Massively Scale Your Deep Learning Training with NCCL
#   2.4](https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/), 2019: two trees
# - [comm/README.md](../comm/README.md): the costs of every collective
# - Next: [04 Naive data parallel](04_naive_data_parallel.ipynb), in which the messages are gradients

# %%
# %ranks stop
