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
# # 11 Long sequences
#
# Open this notebook in [Colab](https://colab.research.google.com/github/YOUR_ACCOUNT/distributed-training-workbook/blob/main/notebooks/11_long_sequences.ipynb), or the workbook
# in a [Codespace](https://codespaces.new/YOUR_ACCOUNT/distributed-training-workbook).
#
# **Question.** A model reads a sequence that is too long for one rank. How can several ranks share *one* sequence, if each
# token needs the keys and values of all tokens before it?
#
# More replicas do not help: a batch may be a single sequence. So the sequence is cut, and each of n ranks has an n-th of the
# tokens, in all layers. This is called *context parallelism*.
#
# You need about 40 minutes. The lesson beside this notebook is [context_parallel](../context_parallel/README.md). You need
# to know `%%ranks` and `predict` from [notebook 02](02_collectives.ipynb): a cell that begins with `%%ranks` runs on all
# ranks, and `predict` asks for your guess before the run.

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
import torch.nn.functional as F

from lab.notebook.prediction import predict

# %% [markdown]
# ## What grows with the length
#
# Embeddings, norms and MLPs look at each token alone. For twice as many tokens, they keep twice as many activations.
# Attention compares each token with each other token: one *score* for each pair of a query and a key, in each head.
# **Predict**: one layer has 8 heads of 64 numbers, and a sequence has 8192 tokens. The queries of the layer, in float32,
# take 16.8 MB. How many MB do the scores of all pairs take?

# %%
scores_MB = predict("How many MB do the scores of the layer take?", example=134, unit="MB")

# %% [markdown]
# First a run with shorter sequences. The lab counts the bytes that autograd keeps for the backward. `plain` computes the
# scores, the softmax and the sum of the values, one after the other. `fused` is PyTorch's attention in one call.

# %%
from lab.trace.memory import saved_activations


def plain(q, k, v):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


print(f"{'tokens':>6} {'plain':>12} {'fused':>12} {'all scores':>14}")
for tokens in (512, 1024, 2048):
    row = []
    for attention in (plain, F.scaled_dot_product_attention):
        q, k, v = (torch.randn(1, 8, tokens, 64, requires_grad=True) for _ in range(3))
        with saved_activations(list) as saved:  # list: there are no parameters to leave out
            attention(q, k, v)
        row.append(saved.bytes / 1e6)
    print(f"{tokens:>6} {row[0]:9.1f} MB {row[1]:9.1f} MB {8 * tokens**2 * 4 / 1e6:11.1f} MB")

# %%
scores_MB.compare(8 * 8192**2 * 4 / 1e6)

# %% [markdown]
# 2.1 GB, for one layer and one sequence. With twice as many tokens, `plain` keeps almost four times as much, and `fused`
# keeps twice as much. The fused kernel works on a few keys at a time and never stores the scores of all pairs. That is
# *FlashAttention*. A causal mask does not help `plain`: it stores masked scores, too. So the first step to long sequences
# needs no second rank.
#
# What remains grows linearly, but it grows in all layers. In the end it does not fit on one rank either. Then each rank must
# have only some of the tokens, and attention must work with keys that are on other ranks.
#
# ## Attention in parts
#
# A query attends to four keys. Two of them are on this rank, and two are on another one. Can the query attend to two keys
# now, and to the others later?
#
# **A common belief**: "a softmax needs all scores at once", because it divides by the sum over all of them. Here is an
# example with simple numbers. Each value is one number, and exp(score) is 1 for the first two keys and 3 for the others.

# %%
scores = torch.tensor([1.0, 1.0, 3.0, 3.0]).log()
values = torch.tensor([1.0, 3.0, 4.0, 8.0])

y_A = scores[:2].softmax(0) @ values[:2]
y_B = scores[2:].softmax(0) @ values[2:]
print(f"over the first two keys: {y_A:.0f}, over the last two keys: {y_B:.0f}")

# %% [markdown]
# **Predict**: what is the attention over all four keys?

# %%
over_all = predict("What is the attention over all four keys?", example=4)

# %%
over_all.compare(scores.softmax(0) @ values)

# %% [markdown]
# The mean of 2 and 6 is 4, and the right result is 5. Each half has divided by its own sum: 1 + 1 = 2 and 3 + 3 = 6. The sum
# over all keys is 8. So the first result has a share of 2/8, and the second one a share of 6/8: 2/8 · 2 + 6/8 · 6 = 5. The
# two sums were missing, and nothing else.
#
# In practice we keep the *logarithm* of each sum, the *log-sum-exp* L, because exp(score) can be too large for a float. Then
# two results over different keys are joined with
#
# $$L = \log(e^{L_A} + e^{L_B}) \qquad y = e^{L_A - L}\, y_A + e^{L_B - L}\, y_B$$
#
# The result has an L, too. So it can be joined with a third one, and so on.

# %%
L_A, L_B = scores[:2].logsumexp(0), scores[2:].logsumexp(0)
L = torch.logaddexp(L_A, L_B)
y = torch.exp(L_A - L) * y_A + torch.exp(L_B - L) * y_B
print(f"factors {torch.exp(L_A - L):.2f} and {torch.exp(L_B - L):.2f}, joined {y:.4f}")

# %% [markdown]
# The same with random numbers: 6 queries and 10 keys, in float64. `attend` returns the result and the log-sum-exp of each
# query. `join` is the function of the lesson.

# %%
from context_parallel.block_attention import join


def attend(q, k, v):
    """Return the attention of queries (t, e) to some keys, and the log-sum-exp of each query's scores (t)."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[:, None]) @ v, lse


torch.manual_seed(0)
q, k, v = (torch.randn(n, 16, dtype=torch.float64) for n in (6, 10, 10))
right, _ = attend(q, k, v)
first, second = attend(q, k[:7], v[:7]), attend(q, k[7:], v[7:])
joined, _ = join(*first, *second)
mean = (first[0] + second[0]) / 2
print(f"largest difference of the mean: {(mean - right).abs().max():.3f}")
print(f"largest difference of the join below 1e-12: {bool((joined - right).abs().max() < 1e-12)}")

# %% [markdown]
# The join is not an approximation. It is the same sum in another order. So a softmax does not need all scores at once. It
# needs one more number for each query and head.
#
# ## The ring
#
# Now on four ranks. Eight tokens, and each rank has two of them, with their queries, keys and values. Queries stay, keys and
# values travel: while a rank attends to the keys that it has, it sends them on to its right neighbour, and receives the next
# ones from its left neighbour. `InFlightShift` ([comm/point_to_point.py](../comm/point_to_point.py)) starts both messages
# and returns at once, and its `wait()` returns what has arrived. Here every query attends to every key; the causal mask
# comes later.

# %%
push(attend=attend)

# %%
# %%ranks
from comm.point_to_point import InFlightShift
from context_parallel.block_attention import join

torch.manual_seed(0)
q_full, k_full, v_full = torch.randn(3, 8, 4, dtype=torch.float64)  # every rank draws the same numbers
own = slice(2 * rank, 2 * rank + 2)
q, kv = q_full[own], torch.stack([k_full[own], v_full[own]])

sources = []
for step in range(world_size):
    sources.append((rank - step) % world_size)
    if step < world_size - 1:
        shift = InFlightShift(kv, torch.empty_like(kv))  # starts to send, and returns
    found = attend(q, *kv)  # in the meantime
    y, lse = found if step == 0 else join(y, lse, *found)
    if step < world_size - 1:
        kv = shift.wait()

right, _ = attend(q_full, k_full, v_full)
f"largest difference below 1e-12: {bool((y - right[own]).abs().max() < 1e-12)}"

# %%
print("         " + "".join(f"step {step}     " for step in range(4)))
for rank, sources in pull("sources").items():
    print(f"rank {rank}   " + "".join(f"keys of {source}  " for source in sources))

# %% [markdown]
# Read a column: in each step every rank has keys, and no two ranks have the same. Read a row: after four steps the queries
# of a rank have met all keys, its own ones first. The keys and values of one rank's tokens are called a *block* here.
# Besides its own block, a rank has at most two at a time: the one that it uses, and the one that is on its way.
#
# The lesson's [train_ring_attention.py](../context_parallel/train_ring_attention.py) is this loop, for batches, heads, a
# causal mask, and with a backward. **Predict**: how many blocks does each of four ranks send in the forward of one layer?

# %%
forward_blocks = predict("How many blocks does a rank send in the forward?", example=4, unit="blocks")

# %%
# %%ranks
from context_parallel.parallel_model import ContextParallel, SharedSequence
from context_parallel.sequence_cut import SequenceCut
from context_parallel.train_ring_attention import ring_attention
from lab.trace.ledger import LEDGER

LENGTH = 1024
sequence = SharedSequence(None, SequenceCut.contiguous(LENGTH, world_size))  # None: all ranks
own_length = sequence.cut.length(rank)
q, k, v = (torch.randn(1, 8, own_length, 64, requires_grad=True) for _ in range(3))
block_bytes = (k.numel() + v.numel()) * k.itemsize

before = LEDGER.total()
y = ring_attention(q, k, v, sequence)
sent_forward = (LEDGER.total() - before).bytes_sent
f"{own_length} tokens, a block has {block_bytes / 1e6:.3f} MB, sent {sent_forward / 1e6:.3f} MB"

# %%
forward_blocks.compare(pull("sent_forward / block_bytes")[0])

# %% [markdown]
# n - 1 blocks: the last keys that arrive are used and not sent on. A step of the ring takes as long as the slower one of two
# things: a message, or attention to a block. The time of a message is proportional to the tokens of a block. The time of
# attention is proportional to the *square* of them. So in long sequences the messages hide behind computing.
#
# ## The backward: gradients travel, too
#
# The gradient of a key is a sum over all queries that have attended to it, and these are on all ranks. A rank can compute
# its term with the log-sum-exp over *all* keys, which it has kept from the forward: then exp(score - L) is the probability.
# But it needs the keys again. So keys and values travel once more. And the gradient of each key? **Predict**: how many
# blocks does a rank send in the backward of the same layer? The gradients of a block have the size of the block.

# %%
backward_blocks = predict("How many blocks does a rank send in the backward?", example=3, unit="blocks")

# %%
# %%ranks
before = LEDGER.total()
y.sum().backward()
sent_backward = (LEDGER.total() - before).bytes_sent
f"sent {sent_backward / 1e6:.3f} MB"

# %%
backward_blocks.compare(pull("sent_backward / block_bytes")[0])

# %% [markdown]
# Three blocks of keys and values, and three blocks of gradients. The next cell sends only the gradients. Each rank adds its
# term to what arrives, and sends the sum on, behind the keys. The term of the rank to which the keys belong stays there. To
# show who has added a term, a gradient is here a list of four numbers: rank r adds 1 to number r.

# %%
# %%ranks
terms_by_step, behind = [], None
for step in range(world_size):
    source = (rank - step) % world_size  # whose keys are here now
    terms = torch.zeros(world_size)
    terms[rank] = 1  # this rank adds its term
    if step == 0:
        own_gradient = terms  # it stays here
        continue
    if behind is not None:
        terms += behind.wait()  # the terms of the ranks where these keys have been before
    terms_by_step.append((source, terms.nonzero().flatten().tolist()))
    behind = InFlightShift(terms, torch.empty_like(terms))
own_gradient += behind.wait()  # the terms of the other ranks
own_gradient

# %%
for rank, steps in pull("terms_by_step").items():
    shown = (f"keys of {source}: terms of {', '.join(map(str, terms)):<7}" for source, terms in steps)
    print(f"rank {rank}   " + "   ".join(shown))

# %% [markdown]
# The columns are steps 1, 2 and 3. Follow the keys of rank 0: on rank 1 their gradient has one term, on rank 2 two terms, on
# rank 3 three terms. The last message goes to rank 0, which adds the fourth term. In total a rank sends 3 (n - 1) blocks in
# a layer: n - 1 forward and 2 (n - 1) backward.
#
# ## Who waits
#
# **A common belief**: "with n ranks attention takes an n-th of the time". Each rank has an n-th of the queries, and all
# ranks compute at the same time.
#
# But a language model has a *causal mask*: a token attends only to itself and to the tokens before it. Let rank 0 of four
# have the first quarter of the sequence, rank 1 the second one, and so on. **Predict**: how many times as much as rank 0
# does rank 3 compute?

# %%
more = predict("How many times as much as rank 0 does rank 3 compute?", example=4, unit="times")

# %%
from context_parallel.sequence_cut import SequenceCut

LENGTH, RANKS = 4096, 4
block = (LENGTH // RANKS) ** 2  # pairs of a query and a key between the tokens of two ranks


def work(cut):
    """Return what each rank computes in each step of the ring: 1 is a block without a mask."""
    return [
        [sum(part.pairs for part in cut.parts(rank, (rank - step) % RANKS)) / block for step in range(RANKS)]
        for rank in range(RANKS)
    ]


contiguous = work(SequenceCut.contiguous(LENGTH, RANKS))
print("         " + "".join(f"step {step}  " for step in range(RANKS)) + "sum")
for rank, steps in enumerate(contiguous):
    print(f"rank {rank}   " + "".join(f"{blocks:6.2f}  " for blocks in steps) + f"{sum(steps):.2f}")

# %%
more.compare(sum(contiguous[3]) / sum(contiguous[0]))

# %% [markdown]
# The number 1 in the table is the attention of a rank's queries to one block of keys, without a mask. Rank 0 computes 0.5 of
# that: its own block, under the mask. All other keys are later than its queries. Rank 3 computes 0.5 and three full blocks,
# 7 times as much. (The exact number is 6.994: a token attends to itself, too, so a block under the mask is a little more
# than 0.5.)
#
# The sum over all ranks is 8. If it were divided equally, each rank would compute 2 blocks. **Predict**: how many times as
# long as that does the ring take with contiguous chunks?

# %%
longer = predict("How many times as long as the balanced division?", example=1, unit="times")

# %%
from context_parallel.makespan import balanced_pairs, step_pairs

for name, make_cut in [("contiguous", SequenceCut.contiguous), ("zigzag", SequenceCut.zigzag)]:
    cut = make_cut(LENGTH, RANKS)
    busiest = [pairs / block for pairs in step_pairs(cut)]
    steps = " + ".join(f"{blocks:.2f}" for blocks in busiest)
    balanced = balanced_pairs(cut) / block
    print(f"{name:<11} {steps} = {sum(busiest):.2f} blocks, balanced {balanced:.2f}: {sum(busiest) / balanced:.3f} times")

# %%
cut = SequenceCut.contiguous(LENGTH, RANKS)
longer.compare(sum(step_pairs(cut)) / balanced_pairs(cut))

# %% [markdown]
# 1.75 times. The busiest rank decides how long each step takes: 0.5 + 1 + 1 + 1 = 3.5 blocks instead of 2. So four ranks are
# not 4 times as fast as one, but 4 / 1.75 = 2.3 times. With many ranks 1.75 becomes almost 2.
#
# The second line of the output is the remedy, the *zigzag* cut. The sequence is cut into 2n chunks instead of n, and rank r
# gets chunk r and chunk 2n - 1 - r. So each rank has an early and a late chunk:

# %%
for name, make_cut in [("contiguous", SequenceCut.contiguous), ("zigzag", SequenceCut.zigzag)]:
    cut = make_cut(16, RANKS)
    print(f"{name}, 16 tokens:")
    for rank in range(RANKS):
        print(f"  rank {rank} has tokens {cut.positions(rank).tolist()}")

print("zigzag, blocks in each step:")
for rank, steps in enumerate(work(SequenceCut.zigzag(LENGTH, RANKS))):
    print(f"  rank {rank}   " + "".join(f"{blocks:6.2f}  " for blocks in steps) + f"{sum(steps):.2f}")

# %% [markdown]
# Half a block, on each rank, in each step. Equal sums would not be enough: the ranks could still wait for each other within
# a step.
#
# Now the clock. To see the time we need one device for each rank, and your computer may have only a few cores. So computing
# is replaced by a sleep: attention to a part sleeps for a time that is proportional to its pairs, and its backward twice as
# long ([clock.py](../context_parallel/clock.py)). The messages are real. Attention of one process would take 0.8 s forward
# and 1.6 s backward.

# %%
# %%ranks
from comm.clocks import gather_events
from context_parallel.clock import clock
from lab.trace import timeline

LENGTH, SECONDS = 4096, 0.8


def makespan(events):
    return max(event.end_ns for event in events) - min(event.start_ns for event in events)


def play(make_cut):
    """Run three times by the clock; return the events of the fastest run, of all ranks, on rank 0."""
    sequence = SharedSequence(None, make_cut(LENGTH, world_size), clock(SECONDS, LENGTH))
    q, k, v = (torch.zeros(1, 1, sequence.cut.length(rank), 8, requires_grad=True) for _ in range(3))
    runs = []
    for _ in range(3):
        dist.barrier()
        timeline.start_recording()
        ring_attention(q, k, v, sequence).sum().backward()
        timeline.stop_recording()
        runs.append(gather_events())
    return min(runs, key=makespan) if rank == 0 else None


events = {"contiguous": play(SequenceCut.contiguous), "zigzag": play(SequenceCut.zigzag)}
balanced = 3 * SECONDS / world_size
times = {name: makespan(one) / 1e9 / balanced for name, one in events.items()} if rank == 0 else None

# %%
from lab.notebook.picture import show_events

show_events(
    pull("events")[0],
    alt="Two timelines of ring attention on four ranks. With contiguous chunks rank 0 waits for most of the time, and only "
    "rank 3 computes all the time. With the zigzag cut all ranks compute all the time and end together, much earlier.",
)
for name, measured in pull("times")[0].items():
    print(f"{name}: {measured:.2f} times as long as the balanced division")

# %% [markdown]
# Grey is waiting. With contiguous chunks rank 0 has little to compute. Its left neighbour is rank 3, which sends the next
# keys only when it begins its next step, so rank 0 waits. With the zigzag cut there is almost no grey. The measured times
# are a few percent above the formula, because messages take some time, too. (A bar is one part of the attention, and each
# step of the zigzag cut has two or three parts, because each rank has two chunks.)
#
# The zigzag cut is made for the causal mask. If several documents are packed into one sequence, and attention stays within
# each, some ranks compute more than others again. Then one can cut each document among the ranks, or use the second
# technique, below.
#
# ## It equals one process
#
# Everything outside of attention looks at each token alone: a rank needs the right positions and the right labels. All ranks
# have all parameters. A rank's gradients come from its own tokens, so they are *terms*, as in data parallelism, and are
# added up after the backward ([parallel_model.py](../context_parallel/parallel_model.py)). Here is a small GPT on real text,
# in float64, on one process and on four ranks. 30 tokens cannot be divided evenly among eight chunks, and need not be.

# %%
# %%ranks
from lab.models.model import GPT, GPTConfig, loss_of
from lab.models.text import global_batch, load_corpus

config = GPTConfig.named("tiny")
x, y = global_batch(load_corpus(), seed=0, step=0, batch_size=2, block_size=30)

alone = GPT(config).double()  # one process
loss_of(alone(x), y).backward()


def compared(attention, make_cut):
    """Return how many gradients there are, and whether all equal those of one process, before and after the sum."""
    model = ContextParallel(GPT(config).double(), attention, make_cut)
    model.loss(model(x), y).backward()

    def all_equal():
        pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
        return all((ours.grad - theirs.grad).abs().max() < 1e-12 for ours, theirs in pairs)

    before = all_equal()
    model.finish_gradient_sync()
    number = len(list(alone.parameters()))
    return f"{number} gradients equal: {before} before the sum, {all_equal()} after it"


compared(ring_attention, SequenceCut.zigzag)

# %% [markdown]
# ## Heads instead of tokens
#
# There is a second way, and it needs no partial results. Heads attend independently of each other. So before attention each
# rank sends every other rank the part of q, k and v that belongs to that rank's heads. This is an all-to-all. Afterwards a
# rank has *all tokens of some heads* instead of *some tokens of all heads*. Attention is then that of one process. A second
# all-to-all turns the result back.
#
# Here are 8 tokens and 4 heads on 4 ranks. Each number says where it belongs: 23 is head 2, token 3. Each rank begins with
# four rows, one for each head.

# %%
# %%ranks
from comm.functions import exchange_shards

head, token = torch.arange(4)[:, None], torch.arange(2 * rank, 2 * rank + 2)
x_ht = 10 * head + token
x_ht.tolist()

# %%
# %%ranks
# Row p goes to rank p. Row p of what arrives comes from rank p: its two tokens of this rank's head.
own_head = exchange_shards(x_ht, dim=0).flatten()
own_head.tolist()

# %%
# %%ranks
y_ht = exchange_shards(own_head.view(4, 2), dim=0)  # two tokens go back to each rank
bool((y_ht == x_ht).all())

# %% [markdown]
# In the lesson the heads of q, k and v for one rank travel together in one all-to-all
# ([train_all_to_all_attention.py](../context_parallel/train_all_to_all_attention.py)). The shapes on a rank, for a batch of
# 1 and the layer from above, 1024 tokens and 8 heads of 64 numbers:
#
# | | batch | heads | tokens | numbers of a head |
# |---|---|---|---|---|
# | q, k, v of a rank | 1 | 8 | 256 | 64 |
# | after the first all-to-all | 1 | 2 | 1024 | 64 |
# | after attention | 1 | 2 | 1024 | 64 |
# | after the second all-to-all | 1 | 8 | 256 | 64 |
#
# Three tensors go out, and one comes back. The backward does the same in the other order. In the ring a rank sends 9 blocks,
# 9.4 MB. **Predict**: how many times as many bytes does the ring send as all-to-all attention, for this layer on four ranks,
# forward and backward?

# %%
ratio = predict("How many times as many bytes does the ring send?", example=1, unit="times")

# %%
# %%ranks
from context_parallel.train_all_to_all_attention import all_to_all_attention

sequence = SharedSequence(None, SequenceCut.contiguous(1024, world_size))


def sent_by(attention):
    """Return the MB that this rank sends for one layer, forward and backward."""
    q, k, v = (torch.randn(1, 8, 256, 64, requires_grad=True) for _ in range(3))
    before = LEDGER.total()
    attention(q, k, v, sequence).sum().backward()
    return (LEDGER.total() - before).bytes_sent / 1e6


ring_MB, all_to_all_MB = sent_by(ring_attention), sent_by(all_to_all_attention)
f"ring {ring_MB:.3f} MB, all-to-all {all_to_all_MB:.3f} MB"

# %%
ratio.compare(pull("ring_MB / all_to_all_MB")[0])

# %% [markdown]
# Three times. In the ring each block visits all ranks. In an all-to-all each number goes only to the one rank that needs it:
# a rank keeps an n-th of its tensors and sends the rest once. So with more ranks each rank sends *less*, about an n-th. The
# formulas, for T tokens, width w of the queries and w_kv of keys and values, in numbers per rank and layer:
#
# | technique | numbers sent | can hide behind attention | at most |
# |---|---|---|---|
# | ring | 6 (n-1)/n T w_kv | yes | any number of ranks |
# | all-to-all | 4 (n-1)/n² T (w + w_kv) | no | as many ranks as heads of keys and values |
#
# Why does anyone use the ring, then? Look at w_kv. In many models several query heads share one head of keys and values
# (*grouped-query attention*). Then all that the ring sends becomes smaller. All-to-all still sends all heads of the queries
# and of the results. Here is ring / all-to-all for 32 query heads:

# %%
print(f"{'heads of keys and values':<25}" + "".join(f"{n:>6} ranks" for n in (2, 4, 8, 16)))
for kv_heads in (32, 8, 4, 2):
    row = ""
    for n in (2, 4, 8, 16):
        ring, all_to_all = 6 * (n - 1) / n * kv_heads, 4 * (n - 1) / n**2 * (32 + kv_heads)
        row += f"{ring / all_to_all:>12.2f}" if n <= kv_heads else f"{'ring only':>12}"
    print(f"{kv_heads:<25}{row}")

# %% [markdown]
# So choose
#
# - the *ring* with few heads of keys and values, or more ranks than such heads, or a slow link and long sequences: what it
#   sends hides behind attention;
# - *all-to-all* with many heads and a fast link, or with masks for which no cut is balanced: each rank has all tokens of its
#   heads, so all ranks compute equally much.
#
# Production systems combine both: all-to-all within a machine, a ring between machines. And the check of the last section
# again, for the second technique:

# %%
# %%ranks
compared(all_to_all_attention, SequenceCut.contiguous)

# %% [markdown]
# ## Memory
#
# Memory was the reason to cut the sequence. Take a GPT with 2 layers of width 128 and one sequence of 2048 tokens. On one
# process, its weights, gradients and Adam's state take 11.1 MB (16 bytes for each parameter), and the activations 38.0 MB:
# together 49.1 MB. **Predict**: how many MB does each of four ranks hold?

# %%
held = predict("How many MB does each of four ranks hold?", example=12.3, unit="MB")

# %%
from lab.models.model import GPT, GPTConfig
from lab.ranks import run_ranks

config = GPTConfig(block_size=2048, num_layers=2, num_heads=8, width=128)


def kept_by(cluster, name):
    """Return the MB of a rank's activations for one sequence."""
    from context_parallel.parallel_model import ContextParallel
    from context_parallel.sequence_cut import SequenceCut
    from context_parallel.train_all_to_all_attention import all_to_all_attention
    from context_parallel.train_ring_attention import ring_attention

    ways = {"ring": (ring_attention, SequenceCut.zigzag), "all-to-all": (all_to_all_attention, SequenceCut.contiguous)}
    model = ContextParallel(GPT(config), *ways[name])
    tokens = torch.arange(2049)[None] % 256
    with saved_activations(model.parameters) as saved:
        model.loss(model(tokens[:, :-1]), tokens[:, 1:])
    return saved.bytes / 1e6


state = 16 * sum(parameter.numel() for parameter in GPT(config).parameters()) / 1e6
kept = {name: [run_ranks(kept_by, n, name)[0] for n in (1, 2, 4)] for name in ("ring", "all-to-all")}
print(f"weights, gradients and Adam's state: {state:.1f} MB on each rank")
for name, megabytes in kept.items():
    print(f"activations, {name}: " + ", ".join(f"on {n}: {mb:.1f} MB" for n, mb in zip((1, 2, 4), megabytes, strict=True)))

# %%
held.compare(state + kept["ring"][2])

# %%
import matplotlib.pyplot as plt

from lab.notebook.picture import COLORS, show

figure, axes = plt.subplots(figsize=(6, 3.2))
bottoms = axes.bar(range(3), state, 0.6, color=COLORS["optimizer"], label="weights, gradients, Adam's state")
bars = axes.bar(range(3), kept["ring"], 0.6, bottom=state, color=COLORS["forward"], label="activations")
axes.bar_label(bottoms, fmt="%.1f", label_type="center")
axes.bar_label(bars, fmt="%.1f", label_type="center")
axes.set(xlabel="ranks", ylabel="MB on a rank", xticks=range(3), xticklabels=["1", "2", "4"], ylim=(0, 60))
axes.legend(frameon=False)
show(
    figure,
    alt="Memory of a rank with ring attention on 1, 2 and 4 ranks. The activations shrink from 38.0 to 19.0 and 9.5 MB. "
    "The weights, gradients and Adam's state are 11.1 MB on each rank, for any number of ranks.",
)

# %% [markdown]
# The activations are divided by n, also those of attention. Weights, gradients and optimizer state are not divided: every
# rank has all of them, as in data parallelism. So ZeRO ([notebook 06](06_zero_and_fsdp.ipynb)) can divide them among the
# same ranks.
#
# Compare this with the sequence parallelism of [notebook 07](07_tensor_and_sequence_parallel.ipynb), which divides tokens,
# too. There the ranks also divide the weights, and they send activations in every layer, 8 to 10 (n-1)/n T w numbers. Here the
# ranks send less in a layer, but also all gradients once in a step. For long sequences that is less in total.
#
# One problem remains. With twice as many ranks, a sequence of twice the length fits. But its attention has four times as
# many pairs, so each rank computes attention for twice as long.
#
# ## Exercises
#
# Begin with `join_attention`: write the function that joins two results over different keys. `check` puts your function in
# the place of the lesson's, on every rank, and runs the lesson's tests. Uncomment the last line when you have written the
# body.

# %%
from exercises.notebook import check


def join(y, lse, other_y, other_lse):
    """Return the attention over the keys of both results, and its log-sum-exp.

    `y` and `other_y` are (b, h, t, e), `lse` and `other_lse` are (b, h, t). The scores may be large: no exp of an lse alone.
    """


# check(join, "join_attention");

# %% [markdown]
# Then `zigzag_cut` and `all_to_all_heads`. In a terminal, `make exercises ARGS='hint zigzag_cut'` shows a hint, and
# `make exercises ARGS='watch all_to_all_heads'` grades the file whenever you save it.
#
# ## Further reading
#
# - [context_parallel/README.md](../context_parallel/README.md): the lesson, in the order in which to read it
# - Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023,
#   [arXiv:2310.01889](https://arxiv.org/abs/2310.01889)
# - Jacobs et al., "DeepSpeed Ulysses", 2023, [arXiv:2309.14509](https://arxiv.org/abs/2309.14509): heads instead of tokens
# - Meta, "The Llama 3 Herd of Models", 2024, [arXiv:2407.21783](https://arxiv.org/abs/2407.21783), section 3.3.2: the zigzag
#   cut in training, with an all-gather of keys and values instead of a ring
# - Dao et al., "FlashAttention", 2022, [arXiv:2205.14135](https://arxiv.org/abs/2205.14135): attention in blocks on one
#   device
# - Next: [12 Many experts](12_many_experts.ipynb)

# %%
# %ranks stop
