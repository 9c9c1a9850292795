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
# # 02 Collectives
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/02_collectives.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** Four ranks have a tensor each. Which patterns of "who gets what" does distributed training need, and
# what happens to them in the backward?
#
# You need about 40 minutes. Each cell that begins with `%%ranks` runs on all four ranks at once; variables stay from
# cell to cell ([lab/notebook/magics.py](../lab/notebook/magics.py)). In other cells `pull("x")` returns the value of `x` on each
# rank. The lesson beside this notebook is [comm/tour.py](../comm/tour.py), and each algorithm is a file in
# [comm/algorithms](../comm/algorithms). These files contain the solutions of the exercises, so do the exercises first.

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
from lab.notebook.prediction import predict

# %% [markdown]
# In this notebook every number tells where it comes from: rank 2 begins with 20, 21, 22 and 23. Two small functions
# keep what each rank has before and after a collective. We draw it all at the end of the first part.

# %%
# %%ranks
pictures = {}


def before(name, tensor):
    pictures[name] = [tensor.tolist()]


def after(name, tensor):
    pictures[name].append(tensor.tolist())


def own_numbers():
    return torch.arange(4.0) + 10 * rank


own_numbers()

# %% [markdown]
# ## One to one: send and receive
#
# A message goes from one rank to another one. Both have to call something: the one sends, the other receives into a
# tensor of the same size, which it must have already.

# %%
# %%ranks
from comm.point_to_point import recv, send

x = own_numbers()
before("send and receive", x)
if rank == 0:
    send(x, dst=3)
if rank == 3:
    recv(x, src=0)
after("send and receive", x)
x

# %% [markdown]
# Everything else is made of such messages. A *collective* is a pattern of messages that all ranks of a group call
# together. Each of them has a name, and you will meet all of the names in training.
#
# ## One to many: broadcast and scatter
#
# Rank 0 has a model, and all ranks need it. That is a *broadcast*. If each rank needs another part of the tensor, it
# is a *scatter*. The rank that has the tensor is called the *root*.

# %%
# %%ranks
from comm import collectives

x = torch.arange(4.0) if rank == 0 else torch.zeros(4)
before("broadcast", x)
collectives.broadcast(x, root=0)
after("broadcast", x)
x

# %%
# %%ranks
full, part = own_numbers(), torch.zeros(1)
before("scatter", full if rank == 0 else part)
collectives.scatter(part, full if rank == 0 else None, root=0)
after("scatter", part)
part

# %% [markdown]
# ## Many to one: gather and reduce
#
# The way back: rank 0 collects the parts of all ranks, which is a *gather*, or only their sum, which is a *reduce*.

# %%
# %%ranks
part, full = torch.tensor([10.0 * rank]), torch.zeros(4)
before("gather", part)
collectives.gather(part, full if rank == 0 else None, root=0)
after("gather", full if rank == 0 else part)
full

# %%
# %%ranks
x = own_numbers()
before("reduce", x)
collectives.reduce(x, root=0)
after("reduce", x)
x

# %% [markdown]
# Together they make the oldest form of parallel computing, a master and its workers: broadcast the input, let each
# rank work on its slice, and gather the results. Here each rank multiplies its slice of a vector by 100:

# %%
# %%ranks
vector = torch.tensor([1.0, 2.0, 3.0, 4.0]) if rank == 0 else torch.zeros(4)
collectives.broadcast(vector, root=0)
mine = vector[rank : rank + 1] * 100  # the work
result = torch.zeros(4) if rank == 0 else None
collectives.gather(mine, result, root=0)
result

# %% [markdown]
# It works, and training does not use it: rank 0 has to send and receive everything, while the others wait. Training
# has no master.
#
# ## Many to many: all-reduce, reduce-scatter, all-gather, all-to-all
#
# Every rank needs the result. **Predict**: each rank r brings a tensor of four numbers, all equal to r. After an
# *all-reduce* that sums, what is in each position, on each rank?

# %%
guess = predict("What is the sum over ranks 0, 1, 2 and 3?", example=6)

# %%
# %%ranks
x = torch.ones(4) * rank
before("all-reduce", x)
collectives.all_reduce(x)
after("all-reduce", x)
x

# %%
guess.compare(pull("x[0].item()")[0])

# %% [markdown]
# An all-reduce is two collectives in sequence. The first one is a *reduce-scatter*, after which each rank has one
# part of the sum. The second one is an *all-gather*, after which each rank has all parts. Both halves have uses of
# their own: ZeRO and FSDP keep the parts.

# %%
# %%ranks
x, mine = own_numbers(), torch.zeros(1)
before("reduce-scatter", x)
collectives.reduce_scatter(mine, x)
after("reduce-scatter", mine)
mine

# %%
# %%ranks
everything = torch.zeros(4)
before("all-gather", mine)
collectives.all_gather(everything, mine)
after("all-gather", everything)
everything

# %% [markdown]
# In the last one every rank has something for every other rank. In an *all-to-all* the p-th part of a rank's tensor
# goes to rank p. It lies there at the place of its sender. **Predict**: rank 1 begins with 10, 11, 12, 13. What is in
# its last position afterwards?

# %%
last = predict("What is in the last position of rank 1 after the all-to-all?", example=13)

# %%
# %%ranks
x, out = own_numbers(), torch.zeros(4)
before("all-to-all", x)
collectives.all_to_all(out, x)
after("all-to-all", out)
out

# %%
last.compare(pull("out[3].item()")[1])

# %% [markdown]
# Rank 1 has number 1 of each rank: 1, 11, 21, 31. If you write the ranks' tensors as the rows of a matrix, an
# all-to-all transposes it. Mixtures of experts send tokens to their experts in this way.
#
# Here is what you have just run. A row is a rank. The colour says which rank a number comes from; black is a sum over
# several ranks.

# %%
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from lab.notebook.picture import COLORS, show

RANK_COLORS = [COLORS[kind] for kind in ("forward", "communication", "backward", "weight")]
pictures = pull("pictures")
SUMS = {"reduce", "all-reduce", "reduce-scatter"}


def color_of(name, is_after, rank, number, position):
    """Return the colour of the rank that a number comes from, and the colour of its text."""
    if name in SUMS and is_after and (name != "reduce" or rank == 0):
        return "black", "white"
    if name == "all-gather" or name == "all-reduce":
        return (RANK_COLORS[position if is_after else rank]), "black"
    if not is_after and rank > 0 and name in ("broadcast", "scatter"):
        return "white", "black"  # not a number that counts
    return RANK_COLORS[int(number // 10)], "black"


figure, grid = plt.subplots(5, 4, figsize=(9, 7.5), layout="constrained")
for axes in grid.flat:
    axes.set_axis_off()
for place, name in enumerate(pictures[0]):
    for is_after in (False, True):
        axes = grid[place // 2, place % 2 * 2 + is_after]
        axes.set(xlim=(0, 4), ylim=(4.05, -0.05))
        axes.set_title(f"{name}: {'after' if is_after else 'before'}", fontsize=10, loc="left")
        for rank in range(4):
            for position, number in enumerate(pictures[rank][name][is_after]):
                fill, ink = color_of(name, is_after, rank, number, position)
                axes.add_patch(Rectangle((position, rank), 0.95, 0.9, facecolor=fill, edgecolor="#999999"))
                axes.text(position + 0.48, rank + 0.48, f"{number:g}", ha="center", va="center", color=ink, fontsize=9)
show(
    figure,
    alt="Nine pairs of tables, before and after each collective, with the numbers of four ranks as rows. A broadcast "
    "fills all rows with rank 0's numbers. A scatter deals them out, and a gather collects one number of each rank on "
    "rank 0. A reduce puts the sum on rank 0, an all-reduce on all ranks. A reduce-scatter leaves one part of the sum on "
    "each rank, an all-gather collects the parts on every rank, and an all-to-all transposes the table.",
)

# %% [markdown]
# ## The same in torch.distributed
#
# The functions above are ours, so that you can read how they work. PyTorch has all of them, with the same meaning:
#
# | collective | here, in `comm.collectives` | `torch.distributed` as `dist` |
# |---|---|---|
# | send and receive | `send(x, dst)`, `recv(x, src)` | `dist.send(x, dst)`, `dist.recv(x, src)` |
# | broadcast | `broadcast(x, root=0)` | `dist.broadcast(x, src=0)` |
# | scatter | `scatter(part, full, root=0)` | `dist.scatter(part, list_of_parts, src=0)` |
# | gather | `gather(part, full, root=0)` | `dist.gather(part, list_of_parts, dst=0)` |
# | reduce | `reduce(x, root=0)` | `dist.reduce(x, dst=0)` |
# | all-reduce | `all_reduce(x)` | `dist.all_reduce(x)` |
# | reduce-scatter | `reduce_scatter(part, full)` | `dist.reduce_scatter_single(part, full)`; before 2.13 `..._tensor` |
# | all-gather | `all_gather(full, part)` | `dist.all_gather_single(full, part)`; before 2.13 `all_gather_into_tensor` |
# | all-to-all | `all_to_all(out, full)` | `dist.all_to_all_single(out, full)` |
#
# A reduction sums unless you say otherwise: `collectives.all_reduce(x, op="mean")`, `dist.all_reduce(x,
# op=dist.ReduceOp.AVG)`. The next cell runs both columns, and compares:

# %%
# %%ranks
def ours_and_torchs():
    part, full, parts = torch.tensor([rank + 1.0]), torch.zeros(4), list(torch.zeros(4, 1))
    on_root = rank == 0

    x, y = own_numbers(), own_numbers()
    collectives.broadcast(x, root=0), dist.broadcast(y, src=0)
    yield "broadcast", x, y

    x, y = torch.zeros(1), torch.zeros(1)
    collectives.scatter(x, own_numbers() if on_root else None, root=0)
    dist.scatter(y, list(own_numbers().split(1)) if on_root else None, src=0)
    yield "scatter", x, y

    collectives.gather(part, full if on_root else None, root=0)
    dist.gather(part, parts if on_root else None, dst=0)
    yield "gather", full, torch.cat(parts)

    x, y = own_numbers(), own_numbers()
    collectives.reduce(x, root=0), dist.reduce(y, dst=0)
    yield "reduce", x if on_root else full, y if on_root else full  # torch leaves partial sums on other ranks

    x, y = own_numbers(), own_numbers()
    collectives.all_reduce(x), dist.all_reduce(y)
    yield "all-reduce", x, y

    x, y = torch.zeros(1), torch.zeros(1)
    collectives.reduce_scatter(x, own_numbers()), dist.reduce_scatter_single(y, own_numbers())
    yield "reduce-scatter", x, y

    x, y = torch.zeros(4), torch.zeros(4)
    collectives.all_gather(x, part), dist.all_gather_single(y, part)
    yield "all-gather", x, y

    x, y = torch.zeros(4), torch.zeros(4)
    collectives.all_to_all(x, own_numbers()), dist.all_to_all_single(y, own_numbers())
    yield "all-to-all", x, y


{name: torch.equal(x, y) for name, x, y in ours_and_torchs()}

# %% [markdown]
# ## What a collective costs
#
# **Predict**: an all-reduce of 4 MB among four ranks, in a ring. How many MB does each rank send? (The tensor has to
# reach three other ranks, and three others have to reach this one.)

# %%
sent = predict("How many MB does each rank send?", example=12.0, unit="MB")

# %%
# %%ranks
from lab.trace.ledger import LEDGER

start = LEDGER.total()
collectives.all_reduce(torch.ones(1_000_000), pattern="ring")
megabytes = (LEDGER.total() - start).bytes_sent / 1e6
megabytes

# %%
sent.compare(pull("megabytes")[0])

# %% [markdown]
# Not 12, and not 4: each rank sends 2 (n-1)/n of the tensor, here 6 MB. (The 192 bytes more are *headers*: before
# each collective our ranks compare what they are about to do.) No rank sends more than twice the tensor, however many
# ranks there are.
#
# The *ring* shows why. The ranks stand in a circle: each one sends only to the next one, its right neighbour, and
# receives only from the one before it. After the last rank comes rank 0. Each rank cuts its tensor into as many
# *chunks* as there are ranks, and in each step it sends one chunk while another one arrives. With four ranks,
# these are the numbers of the chunks:
#
# | | rank 0 sends | rank 1 sends | rank 2 sends | rank 3 sends |
# |---|---|---|---|---|
# | reduce-scatter, step 0 | 3 | 0 | 1 | 2 |
# | step 1 | 2 | 3 | 0 | 1 |
# | step 2 | 1 | 2 | 3 | 0 |
# | afterwards complete on this rank | 0 | 1 | 2 | 3 |
# | all-gather, step 0 | 0 | 1 | 2 | 3 |
# | step 1 | 3 | 0 | 1 | 2 |
# | step 2 | 2 | 3 | 0 | 1 |
#
# Follow chunk 0. Rank 1 sends its own numbers to rank 2, which adds its own and sends the sum to rank 3, which adds
# and sends to rank 0. Rank 0 adds the last ones, so its chunk 0 is complete. In the all-gather it goes around once
# more, as it is. A rank sends 3 + 3 chunks of 1 MB each: 6 MB. Notebook 03 measures the time.
#
# ## Backwards: the claim about the all-gather
#
# Collectives stand in the middle of models, so autograd has to go backward through them. **A common belief**: "the
# backward of an all-gather needs no communication, because every rank already has the full tensor".
#
# Each rank holds one number. They all-gather them and each computes a loss of its own from the four: rank r multiplies
# their sum by r + 1. **Predict**: what is the gradient of rank 0's number, if the loss of the training is the sum of
# the four losses?

# %%
gradient = predict("What is the gradient of rank 0's number?", example=1)

# %%
# %%ranks
from comm import functions

own = torch.tensor([float(rank)], requires_grad=True)
loss = (rank + 1) * functions.gather_tokens(own, dim=0).sum()
loss.backward()
own.grad

# %%
gradient.compare(pull("own.grad.item()")[0])

# %% [markdown]
# The number of rank 0 went into four losses, with the factors 1, 2, 3 and 4. So its gradient is the sum over ranks of
# what each has computed, 10: the backward of an all-gather is a *reduce-scatter*. Without communication rank 0 would
# have found 1, its own factor. The claim holds only if what follows the all-gather is the same on every rank, and
# counts once.
#
# ## The table of forward and backward, proven
#
# There is a rule behind it. A collective is a linear function of the tensors of all ranks together. The backward of a
# linear function is its transpose: where the forward sends a number from rank 0 to rank 3, the backward sends a
# gradient from rank 3 to rank 0. Where the forward copies, the backward adds, and where it adds, the backward copies.
#
# We prove it for each collective. First all four ranks' tensors are put into *one* process, where ordinary autograd
# knows nothing of ranks. Each collective is one line there, a function from four tensors to four tensors. The loss
# gives every number of every rank a weight of its own.

# %%
import torch

zeros = [torch.zeros(4)] * 3
IN_ONE_PROCESS = {
    "broadcast": lambda x: [x[0]] * 4,
    "reduce": lambda x: [sum(x), *zeros],
    "scatter": lambda x: list(x[0].chunk(4)),
    "gather": lambda x: [torch.cat(x), *zeros],
    "all-gather": lambda x: [torch.cat(x)] * 4,
    "reduce-scatter": lambda x: list(sum(x).chunk(4)),
    "all-to-all": lambda x: [torch.cat([tensor.chunk(4)[rank] for tensor in x]) for rank in range(4)],
    "all-reduce": lambda x: [sum(x)] * 4,
}


def weighted(y, rank):
    """Return a loss in which every number has another weight, on every rank."""
    return (y * (torch.arange(y.numel()) + 100 * rank)).sum()


expected = {}
for name, collective in IN_ONE_PROCESS.items():
    x = [(torch.arange(4.0) + 10 * rank).requires_grad_() for rank in range(4)]
    sum(weighted(y, rank) for rank, y in enumerate(collective(x))).backward()
    expected[name] = [torch.zeros(4) if tensor.grad is None else tensor.grad for tensor in x]
push(weighted=weighted, expected=expected)

# %% [markdown]
# Now the same on four ranks. Each computes its own term of the loss, and calls `backward()`. What travels in the
# backward is what [comm/functions.py](../comm/functions.py) says. We compare each rank's gradient, and look into the
# ledger for what was sent.

# %%
# %%ranks
FUNCTIONS = {
    "broadcast": functions.broadcast_from_root,
    "reduce": functions.sum_to_root,
    "scatter": lambda x: functions.scatter_from_root(x, dim=0),
    "gather": lambda x: functions.gather_to_root(x, dim=0),
    "all-gather": lambda x: functions.gather_tokens(x, dim=0),
    "reduce-scatter": lambda x: functions.scatter_sums(x, dim=0),
    "all-to-all": lambda x: functions.exchange_shards(x, dim=0),
    "all-reduce": functions.sum_to_each_rank,
}


def ran_since(rows):
    return sorted({entry.op for entry, traffic in LEDGER.rows().items() if traffic != rows.get(entry)})


proofs = {}
for name, function in FUNCTIONS.items():
    x = own_numbers().requires_grad_()
    y = function(x)
    dist.barrier()
    rows = LEDGER.rows()
    weighted(y, rank).backward()
    dist.barrier()
    proofs[name] = torch.equal(x.grad, expected[name][rank]), ran_since(rows)

# %%
proofs = pull("proofs")
print(f"{'forward':<16}{'backward':<16}gradients equal one process")
for name in IN_ONE_PROCESS:
    backward = {op for rank in range(4) for op in proofs[rank][name][1]}
    print(f"{name:<16}{', '.join(backward):<16}{all(proofs[rank][name][0] for rank in range(4))}")

# %% [markdown]
# Read it as pairs: broadcast and reduce, scatter and gather, all-gather and reduce-scatter are each other's backward.
# An all-to-all is its own: to transpose a matrix twice changes nothing. And an all-reduce is its own, too. Or is it?
#
# ## Backwards: the claim about the all-reduce
#
# **A common belief**: "all-reduce is its own backward". The table has just proven it, for ranks that do *different*
# things with the sum, each with a loss of its own. In tensor parallelism that is not so. Look at the smallest case: two
# ranks, and each has half of two layers. The input is 1. The weights of the first layer are 1 and 2, those of the
# second are 3 and 4. Each rank has one of each, and computes its product. An all-reduce adds the two products, 3 and 8,
# which makes 11. From then on both ranks have the same number and compute the *same* loss, once each.
#
# **Predict**: if the backward of this all-reduce is an all-reduce, how many times too large is the gradient of the
# first weight?

# %%
too_large = predict("How many times too large is the gradient?", example=1)

# %%
# %%ranks
pair = dist.new_group([0, 1])


def gradient_of_first_weight(sum_over_two):
    first = torch.tensor(rank + 1.0, requires_grad=True)  # 1 on rank 0, 2 on rank 1
    second = torch.tensor(rank + 3.0)  # 3 on rank 0, 4 on rank 1
    output = sum_over_two(1.0 * first * second, group=pair)
    assert output == 11
    output.backward()  # the loss is the output itself: its gradient with respect to `first` is `second`
    return first.grad.item()


if rank < 2:
    by_all_reduce = gradient_of_first_weight(functions.sum_to_each_rank)
    by_identity = gradient_of_first_weight(functions.sum_over_ranks)
    print(f"right: {rank + 3.0}, all-reduce in the backward: {by_all_reduce}, identity in the backward: {by_identity}")

# %%
too_large.compare(pull("by_all_reduce", ranks=[0])[0] / pull("by_identity", ranks=[0])[0])

# %% [markdown]
# 2.000 times too large, and n times with n ranks. Both ranks compute one and the same loss. It counts once, so the
# gradient of the sum is complete on each rank already. An all-reduce would add the same gradient n times. Here the
# right backward of the all-reduce is the *identity*: do nothing. Such a factor is hard to see, since Adam divides it
# away and the loss still falls. Notebook 07 meets it again.
#
# So before you write a backward, ask: **do the ranks' losses add up, or are they the same one?**
#
# | forward | backward if the losses add up | backward if all ranks have the same loss |
# |---|---|---|
# | broadcast | reduce | |
# | scatter | gather | |
# | all-to-all | all-to-all | |
# | all-gather | reduce-scatter | keep the own part |
# | reduce-scatter | all-gather | |
# | all-reduce | all-reduce | identity |
#
# ## Exercises
#
# 1. Write what you have seen, in the order of [lesson 1](../comm/README.md): a message, `send_and_receive`; a broadcast,
#    `tree_broadcast` and `binomial_tree`; the ring, `ring_reduce_scatter`, `ring_all_gather` and `ring_all_reduce`. The
#    files in comm/algorithms have the solutions, so do not open them before.
# 2. Later in the lesson come `all_to_all`, and the backward of the collectives, `conjugate_functions`.
#    `make exercises ARGS=list` shows all exercises, and `make exercises ARGS='watch send_and_receive'` grades one on each
#    save. In a notebook a cell can do it:
#    ```python
#    from exercises.notebook import check
#
#    def gather_chunks(wire, chunks):
#        ...
#
#    check(gather_chunks, "ring_all_gather");
#    ```
# 3. With a pencil. Four ranks have 10, 20, 30 and 40. Use only two collectives so that every rank has the *largest* of
#    them, and rank 0 also has the list. Which two?
#    <details><summary>Answer</summary>An all-reduce with <code>op="max"</code>, and a gather to rank 0.</details>
#
#    And a model is broadcast from rank 0 at the start of the training. Must the gradients go backward through this
#    broadcast?
#    <details><summary>Answer</summary>No. It is done once, before the training, and no loss is computed through it.
#    In each step the copies' gradients are averaged by an all-reduce instead. That is a reduce, as in the backward of
#    a broadcast, and then a broadcast of the result.</details>
#
# ## Further reading
#
# - Chan et al., "Collective communication: theory, practice, and experience", 2007
# - Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053), 2019, section 3: the conjugate functions f and g
# - [comm/functions.py](../comm/functions.py): forward and backward of each collective
# - [comm/README.md](../comm/README.md): who sends what in each pattern, and what it costs
# - Next: [03 Cost of a message](03_cost_of_a_message.ipynb)

# %%
# %ranks stop
