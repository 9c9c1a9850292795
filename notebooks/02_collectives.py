# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 Collectives
#
# **Question.** Four ranks have a tensor each. Which patterns of "who gets what" does distributed training need, and what
# happens to them in the backward?
#
# You need about 30 minutes. Each cell that begins with `%%ranks` runs on all four ranks at once; variables stay from
# cell to cell ([lab/notebook.py](../lab/notebook.py)). The lesson beside this notebook is
# [comm/tour.py](../comm/tour.py), and each algorithm is a file in [comm/algorithms](../comm/algorithms).

# %%
# %load_ext lab.notebook
# %ranks 4

# %%
from lab.prediction import predict

# %% [markdown]
# ## One to many: broadcast and scatter
#
# Rank 0 has a model, and all ranks need it. That is a *broadcast*. If each rank needs another part of the tensor, it is
# a *scatter*.

# %%
# %%ranks
from comm import collectives

x = torch.arange(4.0) if rank == 0 else torch.zeros(4)
collectives.broadcast(x, root=0)
x

# %%
# %%ranks
part = torch.zeros(1)
collectives.scatter(part, torch.arange(4.0) * 10 if rank == 0 else None, root=0)
part

# %% [markdown]
# Now each rank works on its part, and rank 0 collects the results: a *gather*. Together the three are the oldest form of
# parallel computing, a master and its workers.

# %%
# %%ranks
part = part * (rank + 1)
full = torch.zeros(4) if rank == 0 else None
collectives.gather(part, full, root=0)
full

# %% [markdown]
# ## Many to many: all-gather, reduce-scatter, all-reduce
#
# Training has no master: every rank needs the result. **Predict**: each rank r brings a tensor of four numbers, all equal
# to r. After an *all-reduce* that sums, what is in each position, on each rank?

# %%
guess = predict("What is the sum over ranks 0, 1, 2 and 3?", example=6)

# %%
# %%ranks
x = torch.ones(4) * rank
collectives.all_reduce(x)
x

# %%
guess.compare(pull("x[0].item()")[0])

# %% [markdown]
# An all-reduce is a reduce-scatter, after which each rank has one part of the sum, and an all-gather, after which each
# rank has all parts. Both halves have uses of their own: ZeRO and FSDP keep the parts.

# %%
# %%ranks
x = torch.arange(4.0) + 10 * rank
mine = torch.zeros(1)
collectives.reduce_scatter(mine, x)
mine

# %%
# %%ranks
everything = torch.zeros(4)
collectives.all_gather(everything, mine)
everything

# %% [markdown]
# ## What a collective costs
#
# **Predict**: an all-reduce of 4 MB among four ranks, in a ring. How many MB does each rank send? (The tensor has to reach
# three other ranks, and three others have to reach this one.)

# %%
sent = predict("How many MB does each rank send?", example=12.0, unit="MB")

# %%
# %%ranks
from lab.ledger import LEDGER

before = LEDGER.total()
collectives.all_reduce(torch.ones(1_000_000), pattern="ring")
megabytes = (LEDGER.total() - before).bytes_sent / 1e6
megabytes

# %%
sent.compare(pull("megabytes")[0])

# %% [markdown]
# Not 12, and not 4: each rank sends 2 (n-1)/n of the tensor, here 6 MB, however many ranks there are. No rank sends more
# than twice the tensor. [comm/algorithms/ring.py](../comm/algorithms/ring.py) shows why, and notebook 03
# measures the time.
#
# ## Backwards
#
# **A claim that many arrive with**: "the backward of an all-gather needs no communication, because every rank already has
# the full tensor". Each rank holds one number. They all-gather them and each computes a loss of its own from the four:
# rank r multiplies their sum by r + 1. **Predict**: what is the gradient of rank 0's number, if the loss of the training
# is the sum of the four losses?

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
# The number of rank 0 went into four losses, with the factors 1, 2, 3 and 4. So its gradient is the sum over ranks of what
# each has computed: the backward of an all-gather is a *reduce-scatter*. The claim holds only if what follows the
# all-gather is the same on every rank. [comm/functions.py](../comm/functions.py) has the forward and backward of each
# collective:
#
# | forward | backward |
# |---|---|
# | broadcast | reduce |
# | scatter | gather |
# | all-gather | reduce-scatter |
# | all-to-all | all-to-all |
# | all-reduce | all-reduce, or the identity where all ranks go on in the same way |
#
# ## Further reading
#
# - Chan et al., "Collective communication: theory, practice, and experience", 2007
# - [comm/README.md](../comm/README.md): who sends what in each pattern, and what it costs

# %%
# %ranks stop
