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
# # 07 Tensor and sequence parallel
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/07_tensor_and_sequence_parallel.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** Several ranks compute *one* layer together, on the same examples. How is a matrix product divided, what must
# the ranks tell each other, and what happens to that in the backward?
#
# Data parallelism and ZeRO divide the examples, and every rank computes all layers. Tensor parallelism divides the layers:
# a rank holds an n-th of each weight, and computes an n-th of each product. So it needs an n-th of the memory *and* an n-th
# of the time, also for a single example. The price is communication inside of every layer.
#
# You need about 40 minutes. The lesson beside this notebook is [tensor_parallel](../tensor_parallel/README.md). You need to
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
# ## A product by columns, and by rows
#
# X has two tokens with two features each, and W turns two features into four. Every rank has the same X. In the first
# division each rank has some *columns* of W, that is, some of the outputs.

# %%
# %%ranks
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
W = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])

columns = W.chunk(2, dim=1)[rank]
X @ columns

# %% [markdown]
# Side by side the two results are X W, and no rank needed the other one. In the second division each rank has some *rows* of
# W. A row of W belongs to an input feature, so a rank needs only that feature of X. **Predict**: X W has 11 in its upper left
# corner. What does rank 0 get there, from the first row of W and the first feature of X?

# %%
corner = predict("What does rank 0 get in the upper left corner?", example=11)

# %%
# %%ranks
rows = W.chunk(2, dim=0)[rank]
feature = X.chunk(2, dim=1)[rank]
term = feature @ rows
term

# %%
corner.compare(pull("term[0, 0].item()")[0])

# %% [markdown]
# 1, and rank 1 has 10. A rank has not *some of* the outputs, but one *term of each* output. So the shape is full, and the
# numbers are not: the terms have to be added up.
#
# | W by | a rank needs | a rank gets | to have all of X W |
# |---|---|---|---|
# | columns | all inputs | some of the outputs | all-gather |
# | rows | some of the inputs | a term of each output | all-reduce |
#
# ## Two layers, and nothing between them
#
# Look at the table again. What a column layer produces, *some of the outputs*, is what a row layer needs, *some of the
# inputs*. So put them behind each other. That is the MLP of a transformer: Y = GELU(X A) B, with A by columns and B by rows.
# GELU works on each number alone, so it needs no other rank.
#
# **A common belief**: "the row-parallel half of an MLP ends in an all-gather". Y has two columns. **Predict**:
# how many columns do you get if you all-gather what the two ranks have, side by side?

# %%
gathered = predict("How many columns does the all-gathered result have?", example=2)

# %%
# %%ranks
import torch.nn.functional as F

from comm.functions import gather_from_ranks, sum_over_ranks

A = torch.tensor([[1.0, -1.0, 0.5, 2.0], [0.0, 2.0, 1.0, -1.0]])
B = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]])
right = F.gelu(X @ A) @ B  # what one process computes

own_A, own_B = A.chunk(2, dim=1)[rank], B.chunk(2, dim=0)[rank]
term = F.gelu(X @ own_A) @ own_B
with_all_gather = gather_from_ranks(term, dim=1)
with_all_reduce = sum_over_ranks(term)
torch.set_printoptions(precision=3, sci_mode=False)
{"one process": right, "with all-reduce": with_all_reduce}

# %%
gathered.compare(pull("with_all_gather.shape[1]")[0])

# %% [markdown]
# The all-gather gives four columns where Y has two. And if you cut them to two, the shape is right and the numbers are one
# rank's terms: each output would use half of its inputs. Such a model even trains; its loss falls, and it is another model.
# The end of a row layer is an **all-reduce of partial sums**, one for the two layers together.
#
# Why not the other order, rows first? Then the all-reduce would be needed *before* the GELU, and a gather behind. GELU is not
# linear: the GELU of a sum is not the sum of the GELUs.

# %%
import torch

a, b = torch.tensor(2.0), torch.tensor(-1.0)
gelu = torch.nn.functional.gelu
print(f"GELU(a + b) = {gelu(a + b):.3f}, GELU(a) + GELU(b) = {gelu(a) + gelu(b):.3f}")

# %% [markdown]
# ## Attention is the same pair
#
# The projections for queries, keys and values are column layers: their outputs are the heads, so a rank gets some of the
# heads. Attention works on each head alone, as GELU does on each number. The output projection is a row layer. `parallelize`
# replaces the layers of a plain GPT in this way. Here are the shapes of each layer's weight and of what it returns, in a GPT
# with 4 heads and width 32: on one process, and on each of two ranks. (PyTorch stores a weight transposed, outputs first.)

# %%
# %%ranks
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus
from tensor_parallel.parallelize import parallelize

config = GPTConfig.named("tiny", num_layers=1)
x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=2, block_size=config.block_size)


def shapes_of(model, gpt):
    """Return the shapes of each layer's weight and output, by name."""
    weights, outputs, hooks = {}, {}, []
    for name, module in gpt.named_modules():
        if getattr(module, "weight", None) is not None:
            note = lambda _, inputs, output, name=name: outputs.update({name: tuple(output.shape)})
            hooks.append(module.register_forward_hook(note))
            weights[name] = tuple(module.weight.shape)
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return {name: (weights[name], outputs.get(name, "")) for name in weights}


plain = GPT(config)
on_one = shapes_of(plain, plain)
parallel = parallelize(GPT(config), overlap=False)
on_two = shapes_of(parallel, parallel.module)

# %%
on_one, on_two = pull("on_one")[0], pull("on_two")[0]
print(f"{'':<26} {'weight':<24} output")
for name, (weight, output) in on_one.items():
    own_weight, own_output = on_two[name]
    print(f"{name:<26} {str(weight):<10} -> {str(own_weight):<10} {str(output):<12} -> {own_output}")

# %% [markdown]
# Read the rows. q, k and v have 16 of 32 outputs: two of four heads. (Their outputs are missing because the parallel model
# calls the three at once, so that their backward sends once.) `o_proj` takes the 16 and returns all 32. `up_proj` returns 64
# of 128 features, and `down_proj` takes them. The norms work on full tensors on every rank. The embedding and the head are
# divided, too; that comes below.
#
# ## The backward: conjugate functions
#
# Autograd differentiates what a rank computes. Communication needs a backward of its own. The end of the row layer is an
# all-reduce. **A claim**: "an all-reduce is its own backward, because the transpose of a sum to all is a sum from all." That
# is true if each rank continues with a *different* computation. Here all ranks compute the *same* loss from the same Y.
# **Predict**: with an all-reduce in the backward, the gradient of A, the column layer's weight, is how many times the right
# one on two ranks?

# %%
factor = predict("How many times too large is the gradient?", example=1, unit="times")

# %%
# %%ranks
from comm.functions import copy_to_ranks, sum_to_each_rank


def gradients(enter, leave):
    """Return the gradients of X and of this rank's A and B, for functions before and behind the pair of layers."""
    own = [tensor.detach().clone().requires_grad_() for tensor in (X, own_A, own_B)]
    Y = leave(F.gelu(enter(own[0]) @ own[1]) @ own[2])
    Y.square().sum().backward()  # every rank computes the same loss
    return [tensor.grad for tensor in own]


leaf_X, leaf_A = X.clone().requires_grad_(), A.clone().requires_grad_()
(F.gelu(leaf_X @ leaf_A) @ B).square().sum().backward()  # one process
right_A, right_X = leaf_A.grad.chunk(2, dim=1)[rank], leaf_X.grad

of_X, of_A, of_B = gradients(copy_to_ranks, sum_to_each_rank)
ratio = (of_A.norm() / right_A.norm()).item()
print(f"the gradient of A is {ratio:.3f} times the right one")


def of_lower_A(leave):
    """Return the gradient of A in the lower one of two such pairs of layers."""
    lower_A = own_A.clone().requires_grad_()
    middle = leave(F.gelu(copy_to_ranks(X) @ lower_A) @ own_B)
    leave(F.gelu(copy_to_ranks(middle) @ own_A) @ own_B).square().sum().backward()
    return lower_A.grad


below = (of_lower_A(sum_to_each_rank).norm() / of_lower_A(sum_over_ranks).norm()).item()
print(f"below a second pair of layers it is {below:.3f} times the right one")

# %%
factor.compare(pull("ratio")[0])

# %% [markdown]
# 2.000, exactly the number of ranks, and for every parameter below this layer. Below a second such layer it is 4.000.
# The loss of the first step is right, and Adam divides the gradient's scale away, so training looks healthy. It is a
# bug that experts have shipped.
#
# Think of it without formulas. Y is the sum of two terms. If a term grows by 1, Y grows by 1. So the gradient of a term
# is the gradient of Y, which every rank has already: the backward is the *identity*.
#
# At the beginning of the pair it is the other way round. Forward, X is just used: nothing is sent. But X went into all
# columns, and a rank computes the gradient that comes from its own columns. These are terms, so the backward must add
# them up:

# %%
# %%ranks
without = gradients(lambda x: x, sum_over_ranks)[0]
within = gradients(copy_to_ranks, sum_over_ranks)[0]
print("gradient of X[0, 0] without the sum:", f"{without[0, 0].item():.3f}")
print("with the sum:", f"{within[0, 0].item():.3f}", "one process:", f"{right_X[0, 0].item():.3f}")

# %% [markdown]
# Each function is the mirror image of the other. Megatron-LM calls them f and g, and they are *conjugate*:
#
# | where | forward | backward | name | in [comm/functions.py](../comm/functions.py) |
# |---|---|---|---|---|
# | before the column layer | identity | all-reduce | f | `copy_to_ranks` |
# | behind the row layer | all-reduce | identity | g | `sum_over_ranks` |
#
# So a pair of layers costs one all-reduce forward and one backward. A transformer's block has two pairs. The backward's
# all-reduce can hide: the gradient of X is reduced while that of the weights is computed
# (`OverlappedColumn` in [tensor_parallel/layers.py](../tensor_parallel/layers.py)).
#
# ## Seeds
#
# The shards have to be parts of *one* random matrix. A simple idea: every rank draws its own shard, and all have the same
# seed, as usual. **Predict**: by how much do the shards of rank 0 and rank 1 differ, at most?

# %%
shards = predict("By how much do the shards of the two ranks differ at most?", example=0.5)

# %%
# %%ranks
from comm.functions import InFlightAllGather

torch.manual_seed(0)
own_shard = torch.nn.Linear(4, 3).weight.detach()
both = InFlightAllGather(own_shard, 0, None).wait()
largest = (both[:3] - both[3:]).abs().max().item()

# %%
shards.compare(pull("largest")[0])

# %% [markdown]
# They are the same: the layer has each feature twice. If the next layer is drawn in the same way, equal features get equal
# gradients, and stay equal. The model has half of its width, and the loss falls. With seeds of their own the ranks would have different shards, but with another
# number of ranks the model would be another one. So the lesson draws the full *master weight* from one seed on every rank,
# keeps this rank's part, and frees the rest. Dropout has the same question in both forms: where all ranks have the same
# activations they need the same mask, and for their own heads masks of their own
# ([tensor_parallel/parallelize.py](../tensor_parallel/parallelize.py)).
#
# ## The bias, once
#
# A row layer has a bias, here 1.0, and gets an input of zeros. One process returns 1.0. On two ranks each calls
# `F.linear(x, weight, bias)`, and the results are summed. **Predict** the output.

# %%
output = predict("What is the output for an input of zeros?", example=1)

# %%
# %%ranks
weight, bias = torch.ones(1, 2), torch.ones(1)
biased = sum_over_ranks(F.linear(torch.zeros(1, 2), weight, bias))
once = sum_over_ranks(F.linear(torch.zeros(1, 2), weight)) + bias
biased.item(), once.item()

# %%
output.compare(pull("biased.item()")[0])

# %% [markdown]
# The sum adds the bias of every rank. It has to be added after the sum. (A new GPT hides this bug:
# its biases begin at zero.)
#
# ## The vocabulary, and its loss
#
# The largest tensor of a language model is often its logits: for each token one number per entry of the vocabulary. The head
# is a column layer, so a rank has the logits of some entries, and the obvious next step is to gather them for the loss.
# **Predict**: 64 tokens and a vocabulary of 32768, on two ranks, in float32. How many MB does a rank send to gather the
# logits? And how many does it send if the ranks compute the loss without gathering?

# %%
gather_MB = predict("MB to gather the logits?", example=1, unit="MB")
loss_MB = predict("MB without gathering them?", example=1, unit="MB")

# %%
# %%ranks
from lab.trace.ledger import LEDGER
from tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tensor_parallel.expected_traffic import ExpectedTraffic

torch.manual_seed(0)
logits, targets = torch.randn(64, 32768), torch.randint(32768, (64,))
own_logits = logits.chunk(2, dim=1)[rank].clone()

start = LEDGER.total()
full_loss = F.cross_entropy(gather_from_ranks(own_logits, dim=1), targets)
middle = LEDGER.total()
parallel_loss = vocab_parallel_cross_entropy(own_logits, targets)
sent = (middle - start).bytes_sent / 1e6, (LEDGER.total() - middle).bytes_sent / 1e6
print(f"loss from gathered logits {full_loss.item():.4f}, from the parts {parallel_loss.item():.4f}")

# %%
gather_MB.compare(pull("sent")[0][0])

# %%
loss_MB.compare(pull("sent")[0][1])

# %% [markdown]
# 4.2 MB against a thousandth of a MB. A cross entropy needs only three numbers of each token from the other ranks: the
# largest logit, the sum of the exponentials, and the target's logit (zero on the rank that does not have it).
# What matters even more: no rank ever holds the full logits
# ([tensor_parallel/cross_entropy.py](../tensor_parallel/cross_entropy.py)). The embedding works like a row layer: a rank looks
# up the tokens whose rows it has, returns zeros for the others, and the sum is right.
#
# ## What a block sends
#
# Data parallelism sends gradients: as many numbers as there are parameters, whatever the batch. Tensor parallelism sends
# activations: 4 all-reduces of batch · time · width numbers for each block. **Predict**: a block of width 128, a batch of 8
# texts of 64 tokens, two ranks. In data parallelism a rank sends the block's gradients, 0.79 MB. How many MB does it send in
# tensor parallelism? (On two ranks an all-reduce sends as many bytes as the tensor has.)

# %%
block_MB = predict("How many MB does a rank send for the block?", example=0.79, unit="MB")

# %%
# %%ranks
config = GPTConfig.named("small", num_layers=1)
x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=8, block_size=config.block_size)
model = parallelize(GPT(config), overlap=False)

counts = {}
block = model.module.blocks[0]
block.register_forward_pre_hook(lambda *_: counts.update(before=LEDGER.total()))
block.register_forward_hook(lambda *_: counts.update(forward=LEDGER.total() - counts["before"]))
block.register_full_backward_pre_hook(lambda *_: counts.update(again=LEDGER.total()))
block.register_full_backward_hook(lambda *_: counts.update(backward=LEDGER.total() - counts["again"]))
model.loss(model(x), y).backward()
megabytes = (counts["forward"] + counts["backward"]).bytes_sent / 1e6
formula = ExpectedTraffic(model).of_parts(x.shape, ["blocks.0"]).bytes_sent / 1e6
f"{megabytes:.3f} MB counted, {formula:.3f} MB by formula"

# %%
block_MB.compare(pull("megabytes")[0])

# %% [markdown]
# More than data parallelism already for 512 tokens, and with the batch it grows. And it cannot wait until the end of the
# backward: the next layer needs the result *now*. On a link of 1 Gbit/s, simulated by the lesson's slow link, a step looks
# like this ([comm/wire/slow_link.py](../comm/wire/slow_link.py) sleeps for the time that the link would take):

# %%
# %%ranks
from comm.clocks import gather_events
from comm.wire import slow_link
from lab.trace import timeline

config = GPTConfig.named("small", num_layers=2)
x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=8, block_size=config.block_size)
model = parallelize(GPT(config))
steps = []
with slow_link.slowed(slow_link.parse("1gbit")):
    for _ in range(8):
        dist.barrier()
        timeline.start_recording()
        with timeline.span("forward", "forward"):
            loss = model.loss(model(x), y)
        with timeline.span("backward", "backward"):
            loss.backward()
        timeline.stop_recording()
        steps.append(gather_events())
events = min(steps, key=lambda step: step[-1].end_ns - step[0].start_ns) if rank == 0 else None  # the fastest

# %%
from lab.notebook.picture import show_events

show_events(
    pull("events")[0],
    alt="One step of tensor parallelism on two ranks over 1 Gbit/s. The forward is interrupted by seven all-reduces. In the "
    "backward five all-reduces run beside the computing, and the ranks wait for the rest of each.",
)

# %% [markdown]
# The orange bars in the upper line are all-reduces of the forward, in which the rank stands still. (The last two, small
# ones are those of the loss.) In the backward the all-reduce has a line of its own, beside the computing, and grey is
# what could not be hidden. Now imagine a GPU that computes a thousand times as fast. That is the reason for a rule that
# you find in every playbook: tensor parallelism stays *inside one machine*, where links are many times as fast
# ([notebook 00](00_setup.ipynb) has a table).
#
# ## Sequence parallelism
#
# What remains on every rank in full are the norms, dropout and residuals, with their activations. *Activations* are
# what autograd keeps of the forward for the backward, and for long texts they are most of the memory. Here are two
# remedies for one process, before the third one. *Recomputation* keeps only the input of each block, and runs its
# forward again in the backward: a third more computing. *Offloading* moves activations to the host's memory and back:
# the link to the host has to be fast enough. Measured here, for a GPT of four blocks, in bytes that autograd keeps:

# %%
from lab.trace.memory import saved_activations
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus

config = GPTConfig.named("24heads")
x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=4, block_size=config.block_size)


class Recomputed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


kept = {}
for name in ("plain", "recomputed"):
    gpt = GPT(config)
    if name == "recomputed":
        gpt.blocks = torch.nn.ModuleList(Recomputed(block) for block in gpt.blocks)
    with saved_activations(gpt.parameters) as saved:
        loss_of(gpt(x), y)
    kept[name] = saved.bytes
    print(f"{name}: {saved.bytes / 1e6:.1f} MB")

# %% [markdown]
# The third remedy costs no computing. The norms, dropout and residuals work on each token alone. So divide them by *tokens*:
# each rank has some of the tokens there, and some of the features inside of the layers. Between the two stands an all-gather
# of the tokens before the column layer, and a reduce-scatter behind the row layer. An all-reduce *is* a reduce-scatter and an
# all-gather ([notebook 02](02_collectives.ipynb)), so the bytes are the same: the all-reduce is cut into its halves, and the norm is moved between
# them.
#
# First tensor parallelism alone, on 1, 2 and 4 ranks:

# %%
from lab.ranks import run_ranks


def kept_by(cluster, sequence_parallel):
    from tensor_parallel.parallelize import parallelize

    model = parallelize(GPT(config), sequence_parallel=sequence_parallel)
    with saved_activations(model.parameters) as saved:
        model.loss(model(x), y)
    return saved.bytes


tensor = {n: run_ranks(kept_by, n, False)[0] / 1e6 for n in (1, 2, 4)}
print(", ".join(f"on {n}: {megabytes:.1f} MB" for n, megabytes in tensor.items()))

# %% [markdown]
# Four ranks do not keep a quarter each, but nearly half. **Predict**: how many MB does each of the four ranks keep with
# sequence parallelism, which sends the same bytes?

# %%
sequence_MB = predict("How many MB does each of four ranks keep?", example=4.5, unit="MB")

# %%
sequence = {n: run_ranks(kept_by, n, True)[0] / 1e6 for n in (1, 2, 4)}
sequence_MB.compare(sequence[4])

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

figure, axes = plt.subplots(figsize=(6, 3.2))
for shift, (name, values, color) in enumerate(
    [("tensor parallel", tensor, "forward"), ("and sequence parallel", sequence, "backward")]
):
    bars = axes.bar([i + 0.4 * shift - 0.2 for i in range(3)], values.values(), 0.38, color=COLORS[color], label=name)
    axes.bar_label(bars, fmt="%.1f")
axes.set(xlabel="ranks", ylabel="MB of activations on a rank", xticks=range(3), xticklabels=["1", "2", "4"], ylim=(0, 12))
axes.legend(frameon=False)
show(
    figure,
    alt="Activations of a rank on 1, 2 and 4 ranks: 10.0, 6.3 and 4.5 MB with tensor parallelism, and with sequence "
    "parallelism, too, 10.0, 5.0 and 2.5 MB: half of it with each doubling of the ranks.",
)

# %% [markdown]
# The lesson sends a quarter more, by choice: it keeps only its own tokens of what a column layer gathers, and gathers the
# others a second time in the backward. With tensor parallelism alone a part does not shrink, however many ranks there are.
# By the formula of Korthikanti et al., a layer keeps s b h (10 + 24/n + 5 a s / (h n)) bytes in 16 bits for b texts of s
# tokens, width h and a heads: the 10 are the norms, dropout and residuals. With sequence parallelism everything is divided by n. One thing is new: the weight of a norm
# has seen only this rank's tokens, so its gradient is a term, and has to be summed at the end of the backward. Without that
# sum the norms of the ranks drift apart, silently.
#
# ## It is still the same training
#
# Ten steps on real text, in float64, on one process and on two ranks with tensor and sequence parallelism:

# %%
# %%ranks
config = GPTConfig.named("tiny")
corpus = load_corpus()


def losses_of(model, compute):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(10):
        x, y = global_batch(corpus, seed=0, step=step, batch_size=8, block_size=config.block_size)
        optimizer.zero_grad()
        loss = compute(model, x, y)
        loss.backward()
        if hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()  # the terms of the norms' gradients
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


alone = losses_of(GPT(config).double(), lambda model, x, y: loss_of(model(x), y))
together = losses_of(
    parallelize(GPT(config).double(), sequence_parallel=True), lambda model, x, y: model.loss(model(x), y)
)
f"loss {alone[0]:.3f} -> {alone[-1]:.3f}; largest difference below 1e-12: {bool((alone - together).abs().max() < 1e-12)}"

# %% [markdown]
# ## Exercises
#
# If you have solved `conjugate_functions` of lesson 1, begin with `column_parallel`:
# `make exercises ARGS='watch column_parallel'` makes its file, and grades it on each save. The second one, `row_parallel`,
# can be written here: the forward of the row layer, with the term, the sum, and the bias once. `check` puts your function
# in the place of the lesson's, on every rank, and runs the lesson's tests. Uncomment the last line when you have written
# the body.

# %%
import torch.nn.functional as F

from comm.functions import scatter_sums, sum_over_ranks
from exercises.notebook import check


def forward(self, x):
    """Return the output of a row layer: x has this rank's inputs, self.weight this rank's part of the weight.

    `sum_over_ranks(term, self.group)` adds the terms up; with `self.sequence_parallel` it is
    `scatter_sums(term, 1, self.group)`.
    `self.bias` may be None.
    """


# check(forward, "row_parallel");

# %% [markdown]
# Then `vocabulary_parallel`: `make exercises ARGS='hint vocabulary_parallel'` in a terminal shows a hint, and
# `make exercises ARGS='watch vocabulary_parallel'` grades the file whenever you save it.
#
# ## Further reading
#
# - [tensor_parallel/README.md](../tensor_parallel/README.md): the lesson, in the order in which to read it, and next to
#   PyTorch's DTensor
# - Shoeybi et al., "Megatron-LM", 2019, [arXiv:1909.08053](https://arxiv.org/abs/1909.08053): columns, rows, f and g
# - Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
#   [arXiv:2205.05198](https://arxiv.org/abs/2205.05198): sequence parallelism, and the formulas
# - Next: [08 Pipelines](08_pipelines.ipynb)

# %%
# %ranks stop
