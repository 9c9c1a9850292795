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
# # 12 Many experts
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/12_many_experts.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** A model with more parameters knows more, but each token should not cost more. How do tokens reach experts that
# lie on other ranks, whose gradient is a mean of what, and how are all experts kept busy?
#
# In the notebooks before, every token passes every parameter. In a *mixture of experts* the MLP of a block becomes several
# MLPs, the experts, and a *router* sends each token to a few of them. The experts are divided among the ranks, and the tokens
# travel.
#
# You need about 30 minutes. The lesson beside this notebook is [expert_parallel](../expert_parallel/README.md). You need to
# know `%%ranks` and `predict` from [notebook 02](02_collectives.ipynb): a cell that begins with `%%ranks` runs on all ranks.

# %%
try:
    import lab
except ImportError:  # the workbook is not here, as in Colab: fetch it and install it
    print("Fetching and installing the workbook ...")
    # !git clone -q --depth 1 https://github.com/YOUR_ACCOUNT/distributed-training-workbook
    # %run distributed-training-workbook/notebooks/colab.py

# %load_ext lab.notebook
# %ranks 2

# %%
from lab.notebook.prediction import predict

# %% [markdown]
# ## More parameters, the same work
#
# A block has an MLP with two matrices of d by 4 d. Replace it by 8 experts of the same size, and let each token pass 2 of
# them. **Predict**: how many times the multiplications of the one MLP does a token need?

# %%
multiplications = predict("How many times the multiplications?", example=8, unit="times")

# %%
import torch

d, E, k, tokens = 64, 8, 2, 1000
mlp = 2 * (d * 4 * d)  # numbers in the two matrices: a token needs one multiplication with each
router = torch.nn.Linear(d, E, bias=False)
needed = k * mlp + router.weight.numel()
print(f"parameters: {(E * mlp + router.weight.numel()) / mlp:.2f} times as many")

# %%
multiplications.compare(needed / mlp)

# %% [markdown]
# Twice as many, and a little for the router, but eight times the parameters. The router is one small matrix. It gives each
# token a score for each expert, and a softmax makes probabilities of them. The token goes to the k experts with the largest
# probabilities.
#
# ## Dispatch and combine
#
# Rank 0 has experts 0 and 1, rank 1 has experts 2 and 3. Each rank has four tokens. To see where they go, a token is just a
# number here, tens for its rank, and the router's choice is given: one expert for each token. **Predict**: how many tokens
# does rank 0 send to rank 1?
#
# | tokens of rank 0 | 0 | 1 | 2 | 3 | | tokens of rank 1 | 10 | 11 | 12 | 13 |
# |---|---|---|---|---|---|---|---|---|---|---|
# | expert | 2 | 0 | 3 | 2 | | expert | 2 | 2 | 0 | 3 |

# %%
crossing = predict("How many tokens does rank 0 send to rank 1?", example=2, unit="tokens")

# %%
# %%ranks
from comm.collectives import all_gather
from comm.functions import exchange_shards

x = torch.arange(4.0) + 10 * rank
expert = torch.tensor([[2, 0, 3, 2], [2, 2, 0, 3]])[rank]

# In order of expert: then what goes to one rank lies together.
order = expert.argsort(stable=True)
counts = expert.bincount(minlength=4)

# Every rank tells all others how many of its tokens go to each expert.
all_counts = torch.empty(2 * 4, dtype=torch.int64)
all_gather(all_counts, counts)
all_counts = all_counts.view(2, 4)  # a row for each rank, a column for each expert

sent = all_counts[rank].view(2, 2).sum(1).tolist()  # to the two experts of each rank
received = all_counts[:, 2 * rank : 2 * rank + 2].sum(1).tolist()
arrived = exchange_shards(x[order], 0, None, sent, received)
f"sends {sent} tokens to ranks 0 and 1, receives {received}: {arrived.int().tolist()}"

# %%
crossing.compare(pull("sent[1]")[0])

# %% [markdown]
# Three: tokens 0, 2 and 3. The all-to-all is *uneven*, because only the router decides how many tokens go where. Rank 1 gets
# six tokens and rank 0 two: the experts of rank 1 work three times as long, and rank 0 waits.
#
# The way back is the same all-to-all with `sent` and `received` exchanged. Here each expert adds a hundredth of its number, so
# that you see who has worked on a token:

# %%
# %%ranks
of_expert = torch.cat([torch.arange(2).repeat_interleave(row[2 * rank : 2 * rank + 2]) for row in all_counts])
outputs = arrived + (of_expert + 2 * rank) / 100
back = exchange_shards(outputs, 0, None, received, sent)
y = torch.empty_like(x)
y[order] = back  # each result to the place of its token
[round(value, 2) for value in y.tolist()]

# %% [markdown]
# Token 0 comes back as 0.02, it was at expert 2, and it stands at its place again. In the lesson each result is multiplied by
# the probability of the choice. That is the router's only way to learn: the choice itself has no gradient, and the factor has
# one. The code is `MixtureOfExperts` in [train_moe.py](../expert_parallel/train_moe.py).
#
# ## Whose gradient is a mean of what
#
# **A common belief**: "in data parallelism every gradient is averaged over all ranks". Each rank has its own tokens here, too,
# and its loss is the mean over them. So the gradient of attention, which every rank holds, is the mean over ranks.
#
# An expert is on one rank only. Each rank computes its backward. **Predict**: on two ranks, how many times too large is the
# gradient of an expert's weight, as the backward leaves it?

# %%
factor = predict("How many times too large is an expert's gradient?", example=1, unit="times")

# %%
# %%ranks
from expert_parallel.config import MoEConfig
from expert_parallel.config import form_groups
from expert_parallel.train_moe import ExpertParallel
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus, rank_slice

config, moe = GPTConfig.named("tiny"), MoEConfig(num_experts=4)
groups = form_groups(world_size)
model = ExpertParallel(GPT(config).double(), moe, groups)
batch = global_batch(load_corpus(), seed=0, step=0, batch_size=8, block_size=config.block_size)
x, y = (rank_slice(part, rank, world_size) for part in batch)
loss_of(model(x), y).backward()
name = f"blocks.0.mlp.experts.{2 * rank}.up_proj.weight"
left_by_backward = dict(model.module.named_parameters())[name].grad.clone()

# %% [markdown]
# One process, with all experts and the full batch, has the right gradient. A group of one rank makes it:

# %%
# %%ranks
import torch.distributed as dist

from expert_parallel.config import ExpertGroups

alone = dist.new_subgroups_by_enumeration([[0], [1]])[0]
one = ExpertParallel(GPT(config).double(), moe, ExpertGroups(alone, alone, alone))
loss_of(one(batch[0]), batch[1]).backward()
right = dict(one.module.named_parameters())
ratio = (left_by_backward.norm() / right[name].grad.norm()).item()

# %%
factor.compare(pull("ratio")[0])

# %% [markdown]
# 2.000, the number of ranks. The backward of the all-to-all has brought the gradients of *both* ranks' tokens to the expert,
# where they add up. Nothing has to be sent for it: the sum is divided by the number of ranks. If you averaged it over the
# ranks, as all other gradients, you would mix the gradients of *different* experts. After `finish_gradient_sync` every gradient
# is that of one process:

# %%
# %%ranks
model.finish_gradient_sync()
differences = [
    (p.grad - right[name].grad).abs().max().item() / right[name].grad.abs().max().item()
    for name, p in model.module.named_parameters()
    if right[name].grad.abs().max() > 1e-9
]
f"{len(differences)} gradients, largest relative difference below 1e-12: {max(differences) < 1e-12}"

# %% [markdown]
# ## Which experts work
#
# **A common belief**: "the router learns to use all experts". 8 experts, two for each token, on two ranks, a small model, 30
# steps on real text. If all experts were chosen equally, each would get an eighth of all choices. **Predict**: how many times
# as many does the busiest expert get after 30 steps? (The most that is possible is 4: a token cannot choose the same expert
# twice.)

# %%
busiest = predict("How many times the mean does the busiest expert get?", example=1, unit="times")

# %%
# %%ranks
def shares_of_experts(balance):
    """Train for 30 steps; return the share of each expert in the first block, by step."""
    model = ExpertParallel(GPT(config), MoEConfig(), groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shares = []
    for step in range(30):
        batch = global_batch(load_corpus(), seed=0, step=step, batch_size=24, block_size=config.block_size)
        x, y = (rank_slice(part, rank, world_size) for part in batch)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        if balance:
            loss = loss + 0.01 * model.auxiliary_loss()
        loss.backward()
        model.finish_gradient_sync()
        optimizer.step()
        chosen = model.layers[0].chosen_rE.sum(0).double()
        shares.append((chosen / chosen.sum()).tolist())
    return shares


unbalanced, balanced = shares_of_experts(False), shares_of_experts(True)

# %%
busiest.compare(round(8 * max(pull("unbalanced")[0][-1])))

# %% [markdown]
# Almost 4: two experts get nearly all tokens, and six experts learn nothing. An expert that gets more tokens learns more, so
# its results get better, and it gets still more tokens. Nothing in the loss of the text works against that. A term of the loss
# does: E times the sum over experts of f P, where f is the share of choices that fell on an expert, and P its mean probability.
# It is 1 if all experts get equally much. The counts f are those of *all* ranks ([balancing.py](../expert_parallel/balancing.py)):
# with its own counts each rank would balance its own tokens, and the result would depend on the number of ranks.

# %%
import matplotlib.pyplot as plt
from lab.trace.gantt import COLORS
from lab.notebook.picture import show

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), sharey=True)
for axes, shares, title in ((left, pull("unbalanced")[0], "without balancing"), (right, pull("balanced")[0], "with the term")):
    for expert in range(8):
        axes.plot([step[expert] for step in shares], color=list(COLORS.values())[expert])
    axes.axhline(1 / 8, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="step", title=title)
left.set(ylabel="share of all choices")
show(
    figure,
    alt="Share of each of 8 experts over 30 steps. Without balancing two experts rise to a half each and the others fall to "
    "zero; with the term of the loss the lines stay around an eighth, the dashed line.",
)

# %% [markdown]
# ## What it sends
#
# Data parallelism could hold all experts on every rank and average their gradients: 2 (n-1)/n · E · 8 d² numbers for a layer.
# With experts on different ranks, a rank sends its t tokens to k experts each and gets the results, and the same for the
# gradients: 4 (n-1)/n · t · k · d numbers. The first grows with the model, the second with the tokens. **Predict**: with E = 8,
# k = 2, d = 256 and t = 512 tokens of a rank, how many times as much does data parallelism send?

# %%
times = predict("How many times as much does data parallelism send?", example=1, unit="times")

# %%
E, k, d, t = 8, 2, 256, 512
times.compare((2 * E * 8 * d**2) / (4 * t * k * d))

# %% [markdown]
# 8 times. In general it is 4 E d / (t k): experts on different ranks send less if t k < 4 E d. And a rank stores only its own
# experts, with their gradients and the optimizer's state, which is the main reason to do it.
# `python benchmarks/expert_parallel.py` measures both sides, also where the other one wins.
#
# ## Exercises
#
# Begin with `dispatch_and_combine`: which tokens are sent in which order, and where the results are added. `check` puts your
# functions in the place of the lesson's, on every rank, and runs the lesson's tests. Open
# `exercises/expert_parallel/dispatch_and_combine.py`, and grade it with `make exercises ARGS='watch dispatch_and_combine'`.
# Then `expert_gradients` and `balance_experts`.
#
# ## Further reading
#
# - [expert_parallel/README.md](../expert_parallel/README.md): the lesson, with capacity, replicas of experts, and a shared expert
# - Shazeer et al., "Outrageously Large Neural Networks", 2017, [arXiv:1701.06538](https://arxiv.org/abs/1701.06538)
# - Fedus, Zoph and Shazeer, "Switch Transformers", 2021, [arXiv:2101.03961](https://arxiv.org/abs/2101.03961): the balancing term
# - DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, [arXiv:2412.19437](https://arxiv.org/abs/2412.19437): the bias
# - Next: [13 Sending less](13_sending_less.ipynb)

# %%
# %ranks stop
