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
# # 01 Ranks
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/01_ranks.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** Several processes run the same file. How do they find each other, and how does each know which part of
# the work is its own?
#
# You need about 30 minutes. The lesson files beside this notebook are [comm/rendezvous.py](../comm/rendezvous.py),
# which lets processes become ranks, and [data_parallel/sampler.py](../data_parallel/sampler.py), which gives each
# rank its share of the data.
#
# ## One program, several processes
#
# A parallel job consists of *ranks*: processes that are numbered from 0 on. The number of ranks is the *world size*.
# All ranks run the same program, and the number is the only thing that makes them different. The next cell starts
# four.

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
# %%ranks
f"rank {rank} of {world_size}"

# %% [markdown]
# A cell with `%%ranks` in its first line runs on all ranks, and one with `%%rank 2` on rank 2 only. There the names
# `rank`, `world_size`, `device`, `torch` and `dist` (`torch.distributed`) need no import. `pull("x")` in an ordinary
# cell returns the value of `x` on each rank. **Predict**: all ranks set `x` to 1. Then rank 2 sets `x` to 5. What is
# `x` on rank 0 afterwards?

# %%
from lab.notebook.prediction import predict

x_on_rank_0 = predict("What is x on rank 0?", example=5)

# %%
# %%ranks
x = 1

# %%
# %%rank 2
x = 5

# %%
# %%ranks
x

# %%
x_on_rank_0.compare(pull("x")[0])

# %% [markdown]
# Ranks are processes, so they share no memory, unlike threads. Rank 0 cannot see what rank 2 has, even on the same
# machine. If another rank needs what one rank knows, it has to be sent. That is the subject of notebook 02.
#
# But before two ranks can send anything, they must know each other's address. How do they learn it?
#
# ## Two ranks by hand
#
# The cell below writes a small program. It joins the other ranks, adds a number up over all ranks (an *all-reduce*:
# each rank gets the sum), and says what came out. Then it waits. For each line that it reads (press Enter) it adds up a
# million numbers. It ends when its input ends (press Ctrl-D).

# %%
from lab.notebook import REPOSITORY

program = REPOSITORY / "runs" / "two_ranks.py"
program.parent.mkdir(exist_ok=True)
program.write_text("""
import sys

import torch

from comm.collectives import all_reduce
from comm.script import joined

with joined() as cluster:
    x = torch.tensor([cluster.rank + 1.0])
    all_reduce(x)
    print(f"I am rank {cluster.rank} of {cluster.world_size}, and the sum is {x.item():g}.", flush=True)
    for line in sys.stdin:
        all_reduce(torch.ones(1_000_000))
        print("added up a million numbers", flush=True)
""");

# %% [markdown]
# A process becomes a rank by four variables of its environment: its own number, the number of ranks, and the address
# and port of the *master*. The master is rank 0. You can type the two commands that the next cell prints in two
# terminals, in the folder of the workbook. Here the notebook types them for you. It starts rank 0 alone first.

# %%
import os
import socket
import subprocess
import sys

with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]  # a free one


def start(**variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | variables
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([sys.executable, program], env=environment, text=True, **pipes)


def settings(rank, world_size=2):
    return dict(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


for rank in (0, 1):
    variables = " ".join(f"{name}={value}" for name, value in settings(rank).items())
    print(f"terminal {rank}:  {variables} .venv/bin/python runs/two_ranks.py")

rank_0 = start(**settings(0))
print()
print(rank_0.stderr.readline(), end="")
print(rank_0.stderr.readline(), end="")

# %% [markdown]
# ## The store's keys, live
#
# Rank 0 waits, but it has already done something: it has opened a *store* at the master's address. A store is a small
# server that keeps values under keys, like a dictionary that several processes can reach. It answers anyone who knows
# its address. So the notebook can connect, too, and look inside. (You need not read `meaning`: it only puts the values
# into words.)

# %%
import json
import re
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


def meaning(key, value):
    """Return in words what is stored under a key."""
    if key.startswith("rank/"):
        return "process {pid} on {host}".format(**json.loads(value))
    if key == "liveness":
        host, port = json.loads(value)
        return f"{host}:{port}: here rank 0 notices if a rank dies"
    if key.startswith("group/"):
        address = re.search(rb"\x02\x00(..)\x7f\x00\x00\x01", value, re.DOTALL)  # a socket address
        return f"127.0.0.1:{int.from_bytes(address[1], 'big')}: here gloo listens" if address else ""
    return {"seen": "has seen the names of all ranks", "formed": "is connected to all"}.get(key.split("/")[0], "")


def show_keys():
    for key in sorted(store.list_keys()):
        name = key.removeprefix("attempt_0/")  # torchrun may start a job again, as attempt 1
        print(f"{name:<20} {meaning(name, store.get(key))}")


show_keys()

# %% [markdown]
# Rank 0 has written its own name and an address. There is no `rank/1` yet, and that is why rank 0 waits. Now rank 1
# starts. It knows nothing but the same address, its own number, and that there are two ranks.

# %%
rank_1 = start(**settings(1))
for process in (rank_0, rank_1):
    print(process.stdout.readline(), end="")

# %% [markdown]
# They have met, and they have added up 1 and 2. Look at the store again:

# %%
show_keys()

# %% [markdown]
# Together the keys tell how the ranks have met. This is called the *rendezvous*, and it has four steps:
#
# 1. Each rank writes its name under `rank/`, and waits until all names are there.
# 2. Each notes under `seen/` that it has seen all of them, and waits until all have. So either all go on, or all give up.
# 3. The library that will move the tensors, gloo, puts the address at which a rank listens under `group/`. Each rank
#    reads the others' addresses and connects to them directly. (PyTorch chooses the names of these keys. The last
#    number is the rank.)
# 4. Each notes under `formed/` that its connections stand.
#
# Rank 0 is called the master. **A common belief**: "the tensors of all ranks go through the master". If
# they went through its store, an all-reduce would leave keys there. **Predict**: how many keys are added when the two
# ranks add up a million numbers?

# %%
added_keys = predict("How many keys does an all-reduce add to the store?", example=2)

# %%
before = store.num_keys()
for process in (rank_0, rank_1):  # press Enter in both terminals
    process.stdin.write("\n")
    process.stdin.flush()
for process in (rank_0, rank_1):
    print(process.stdout.readline(), end="")
added_keys.compare(store.num_keys() - before)

# %% [markdown]
# None: 0 keys. The store is a meeting place, and nothing else. After the rendezvous the ranks talk over connections of
# their own, and rank 0 computes and sends like any other rank. (With two ranks one of both is always the master.
# Notebook 02 counts the bytes of four ranks in a ring: each sends the same.) If rank 0 dies, the store is lost. But the
# job ends in any case when a rank dies, because the others wait for its numbers.
#
# With Ctrl-D the two ranks end:

# %%
for number, process in enumerate((rank_0, rank_1)):
    process.stdin.close()
    print(f"rank {number} ended with exit code {process.wait(60)}")

# %% [markdown]
# In plain PyTorch the rendezvous is one call. It reads the same four variables of the environment:
#
# ```python
# import torch.distributed as dist
#
# dist.init_process_group("gloo")       # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set
# dist.get_rank(), dist.get_world_size()
# ```
#
# ## What goes wrong at the start
#
# Most first attempts on a cluster fail before the first step of training, because one of the four variables is wrong.
# Below are four mistakes. Cover the output, and say for each one what you expect: an error, waiting, or something
# that looks as if it worked.

# %%
mistakes = {
    "a number that does not exist: RANK=2 of 2": settings(2),
    "rank 1 was never started, and rank 0 waits": settings(0) | {"JOIN_TIMEOUT": "1"},
    "rank 0 was never started": settings(1) | {"JOIN_TIMEOUT": "1", "MASTER_PORT": str(port + 1)},
    "no variable is set at all": {},
}
processes = {mistake: start(**variables) for mistake, variables in mistakes.items()}
for mistake, process in processes.items():
    out, error = process.communicate("")
    print(f"{mistake}\n    exit code {process.returncode}: {(out or error).splitlines()[-1]}\n")

# %% [markdown]
# The last one is the most dangerous: nothing fails. In the workbook a process without `RANK` and `WORLD_SIZE` is a job
# of one rank, so that each lesson runs without a launcher, too, and many training scripts do the same. (PyTorch's
# `init_process_group` alone would raise an error.) If you start four such processes, you get four trainings that know
# nothing of each other, each as slow as one. So look at the world size that a job prints.
#
# The timeout is 60 seconds unless you set `JOIN_TIMEOUT`. If rank 0 waits, look at the others' logs first: usually
# one of them has failed before it could join.
#
# ## torchrun counts for you
#
# With 64 ranks you would not want to type 64 commands. The launcher `torchrun` runs once on each machine, starts that
# machine's processes, and sets their variables. A process then has two numbers: `RANK` counts over all machines, and
# `LOCAL_RANK` within one machine. The second one chooses the GPU. **Predict**: two machines with two processes each.
# What is the `RANK` of the last process on the second machine, whose `LOCAL_RANK` is 1?

# %%
last_rank = predict("What is RANK where LOCAL_RANK is 1 on the second machine?", example=1)

# %% [markdown]
# Two launchers on this machine play the two machines. Their processes only print their variables:

# %%
say = 'echo "RANK=$RANK LOCAL_RANK=$LOCAL_RANK WORLD_SIZE=$WORLD_SIZE on machine $GROUP_RANK"'


def torchrun(machine):
    options = ["--nnodes=2", f"--node_rank={machine}", "--nproc_per_node=2"]
    options += ["--master_addr=127.0.0.1", f"--master_port={port}", "--no-python"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "bash", "-c", say]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


launchers = [torchrun(machine) for machine in (0, 1)]
lines = sorted(line for launcher in launchers for line in launcher.communicate()[0].splitlines())
print(*lines, sep="\n")
last_rank.compare(int(re.search(r"RANK=(\d+)", lines[-1])[1]))

# %% [markdown]
# ## gloo against nccl
#
# The rendezvous ends with a *process group*: ranks that are connected by a *backend*. The backend is the library that
# moves the tensors.

# %%
# %%ranks
dist.get_backend(), str(device)

# %% [markdown]
# | | gloo | nccl |
# |---|---|---|
# | tensors are in | the processor's memory | the memory of NVIDIA GPUs (on AMD's it is RCCL, under the same name) |
# | bytes go over | TCP sockets | NVLink, PCIe, InfiniBand or sockets, whichever is fastest |
# | the work is done by | threads of the processor | programs on the GPU, which take a part of it |
# | a call without `async_op` returns | when the tensor may be used | at once: the GPU does it later, after the calls before it (this queue is called a *stream*) |
# | ranks for each device | as many as you like | one: each rank needs its own GPU |
# | if ranks do not agree | an error or a timeout in the call | often a hang, until PyTorch's watchdog, a thread that looks after it, kills the process |
# | good for | learning, tests, data in the processor's memory | training |
#
# What both have in common is more important: the same calls of `torch.distributed`, with the same meaning. What you
# learn on gloo is true on nccl, apart from the speed and from *when* things happen. So this workbook can teach on a
# laptop. If you ask for nccl here, without a GPU, you get a sentence:

# %%
from lab.launch.errors import WorkbookError
from lab.ranks import run_ranks

try:
    run_ranks(lambda cluster: dist.get_backend(), 2, backend="nccl")
except WorkbookError as error:
    print(error)

# %% [markdown]
# ## Which examples are mine?
#
# In *data parallel* training each rank has a copy of the model and a share of the examples. Below is what happens if
# you start your program for one device on four ranks, and change nothing. A `DataLoader` shuffles ten examples and
# makes batches of two. All ranks use the same seed, as they should for equal initial weights. **Predict**: the four
# ranks together hold 8 examples in their first batches. How many *different* ones?

# %%
different = predict("How many different examples are in the first batches of four ranks?", example=8)

# %%
# %%ranks
from torch.utils.data import DataLoader

torch.manual_seed(0)
loader = DataLoader(range(10), batch_size=2, shuffle=True)
first_batch = next(iter(loader)).tolist()
first_batch

# %%
different.compare(len({example for batch in pull("first_batch").values() for example in batch}))

# %% [markdown]
# All ranks do the same work. The job is as slow as one rank, and the loss falls as it would on one. Nothing warns
# you. So each rank needs its own *share*. A *sampler* chooses it: all ranks shuffle with the same seed, so they know
# the same order, and rank r takes every fourth example of it, beginning with number r.
#
# **Predict**: there are ten examples and four ranks. How many examples does each rank get?

# %%
share_size = predict("How many examples does each rank get?", example=2.5)

# %%
# %%ranks
from data_parallel.sampler import DistributedSampler

sampler = DistributedSampler(num_examples=10, rank=rank, world_size=world_size)
share = list(sampler)
share

# %%
share_size.compare(len(pull("share")[0]))

# %% [markdown]
# Three each, which makes twelve. Two examples occur twice: 4 on ranks 0 and 2, and 1 on ranks 1 and 3. All ranks must
# take the same number of steps, because in each step they wait for each other's gradients. A rank with one batch more
# would wait for gradients that never come. So the sampler repeats the first examples. (With `uneven="drop"` it leaves
# the last ones out instead.) In a large dataset this makes no difference to training. In an evaluation it does: the
# accuracy would count some examples twice. There use `uneven="keep"`.
#
# PyTorch's own sampler gives the same shares:

# %%
# %%ranks
from torch.utils.data import DistributedSampler as TorchSampler

list(TorchSampler(range(10), num_replicas=world_size, rank=rank, shuffle=True, seed=0)) == share

# %% [markdown]
# ## With and without set_epoch
#
# An *epoch* is one pass over the data. On one device a `DataLoader` shuffles again in each epoch. A distributed
# sampler cannot draw random numbers as it likes, because all ranks have to draw the same ones. So it computes the
# order from the seed and the number of the epoch, and you have to set that number: `sampler.set_epoch(epoch)`. Many
# training loops forget the call.
#
# **Predict**: how many different orders do three epochs have without it?

# %%
orders = predict("How many different orders do three epochs have without set_epoch?", example=3)

# %%
# %%ranks
without = [list(sampler) for epoch in range(3)]

with_it = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    with_it.append(list(sampler))

{"without": without, "with": with_it}

# %%
orders.compare(len({str(share) for share in pull("without")[0]}))

# %% [markdown]
# The picture shows which rank gets which example. The colour and the number are the rank. A cell with two colours is
# one of the repeated examples.

# %%
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from lab.notebook.picture import COLORS, show

RANK_COLORS = [COLORS[kind] for kind in ("forward", "communication", "backward", "weight")]
figure, panels = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained", sharey=True)
for axes, title, name in zip(panels, ("without set_epoch", "with set_epoch"), ("without", "with_it"), strict=True):
    shares = pull(name)
    for epoch in range(3):
        for example in range(10):
            owners = [rank for rank in range(4) if example in shares[rank][epoch]]
            for i, rank in enumerate(owners):
                at, height = epoch + i / len(owners), 1 / len(owners)
                axes.add_patch(Rectangle((example, at), 1, height, facecolor=RANK_COLORS[rank], edgecolor="white"))
                size = 9 if height == 1 else 6
                axes.text(example + 0.5, at + height / 2, rank, ha="center", va="center", fontsize=size)
    axes.set(xlim=(0, 10), ylim=(3, 0), xlabel="example", title=title)
    axes.set_xticks([x + 0.5 for x in range(10)], range(10))
    axes.set_yticks([0.5, 1.5, 2.5], ["epoch 0", "epoch 1", "epoch 2"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
show(
    figure,
    alt="Two tables of three epochs by ten examples, with the rank that gets each example. Without set_epoch the three "
    "rows are equal. With set_epoch every row is different, and in each row all four ranks occur.",
)

# %% [markdown]
# Without `set_epoch` the three rows on the left are equal: each rank sees the same three examples in every epoch, in
# the same order and the same batches. The training runs, and again nothing warns you.
#
# There is a worse mistake. Suppose that you write `if rank == 0: sampler.set_epoch(epoch)`, as one does for printing.
# **Predict**: of 100 examples on four ranks, how many are seen by at least one rank in epoch 1?

# %%
seen = predict("How many of 100 examples are seen in epoch 1?", example=100)

# %%
# %%ranks
sampler = DistributedSampler(num_examples=100, rank=rank, world_size=world_size)
if rank == 0:
    sampler.set_epoch(1)
share = list(sampler)
len(share)

# %%
seen.compare(len(set().union(*pull("share").values())))

# %% [markdown]
# Each rank still has 25 examples, but rank 0 took them from another order than the others. So 18 of its examples
# belong to other ranks as well, and 18 examples are seen by no rank. All ranks must compute the shares from the same
# numbers. This rule will return in every chapter: **what all ranks decide alone, they must decide from the same
# data.**
#
# ## Exercises
#
# 1. Write the sampler yourself: the exercise `sampler`, 20 minutes. `make exercises ARGS='watch sampler'` makes
#    the file `exercises/data_parallel/sampler.py`, and grades it whenever you save it.
#    Or write the function in a cell below, and let `check` put it into the lesson on real ranks:
#    ```python
#    from exercises.notebook import check
#
#    def __iter__(self):
#        ...
#
#    check(__iter__, "sampler");
#    ```
# 2. Type the two commands of "Two ranks by hand" in two terminals, but give the second one `WORLD_SIZE=3`. What do the
#    ranks say? Which rank finds the mistake?
#    <details><summary>Answer</summary>The rank that reads the other's name first finds the mistake. It writes a
#    sentence with both numbers into the store, under the key <code>failed</code>, where the other one reads it. So
#    both give up, and rank 0 prints the sentence once.</details>
# 3. Start both with `RANK=0`.
#    <details><summary>Answer</summary>Both try to open the store. The second one finds the port taken, says so, and
#    ends. The first one still waits for rank 1.</details>
#
# ## Further reading
#
# - [comm/rendezvous.py](../comm/rendezvous.py), [comm/membership/meeting.py](../comm/membership/meeting.py): all
#   steps of the rendezvous
# - PyTorch's documentation: [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html) and
#   [distributed](https://docs.pytorch.org/docs/stable/distributed.html), with a table of what each backend can do
# - Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel
#   Training](https://arxiv.org/abs/2006.15704), 2020, section 3
# - Next: [02 Collectives](02_collectives.ipynb)

# %%
# %ranks stop
