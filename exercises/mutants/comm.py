"""Wrong implementations of collectives, their algorithms and their gradients."""

from exercises.mutants import mutant

COLLECTIVES_BY_HAND = "tests/comm/test_collectives_by_hand.py::"
FUNCTIONS = "tests/comm/test_functions.py::"
NARRATED = "tests/comm/test_narrated.py::"
COLLECTIVES = "tests/comm/test_collectives.py::"
COST = "tests/comm/test_cost.py::"

mutant(
    "all_gather_by_arrival",
    "Ranks compute with different weights: each puts gathered shards together in the order of arrival.",
    target="comm.algorithms.ring.all_gather",
    changes={
        "chunks[wire.rank].copy_(shard)\ngather_chunks(wire, chunks)": (
            "chunks[0].copy_(shard)\n"
            "for step in range(1, wire.size):\n"
            "    shift(wire, chunks[step - 1], chunks[step])"
        ),
    },
    killer=COLLECTIVES_BY_HAND + "test_an_all_gather_puts_shards_in_rank_order_on_every_rank",
)

mutant(
    "broadcast_gradient_not_summed",
    "The gradients of the other ranks are lost: the root learns only from its own use of the tensor.",
    target="comm.functions.broadcast_from_root",
    changes={"lambda grad: _reduce(grad, root, group)": "lambda grad: grad"},
    killer=FUNCTIONS + "test_the_conjugate_of_a_broadcast_is_a_sum_and_that_of_a_sum_a_broadcast",
)

mutant(
    "doubling_adds_into_what_is_being_sent",
    "Ranks end with different sums: a rank adds into a segment that its partner has not read yet.",
    target="comm.algorithms.hypercube.recursive_doubling",
    changes={"sent.wait()": ""},
    killer=COLLECTIVES_BY_HAND + "test_an_all_reduce_does_not_change_what_is_still_being_sent",
    symptom="Once in many runs the ranks end an all-reduce with different sums.",
)

mutant(
    "doubling_meets_the_same_partner",
    "Four ranks end with twice the sum of two: each rank has the same partner in all rounds of the doubling.",
    target="comm.algorithms.hypercube.recursive_doubling",
    changes={"wire.rank ^ distance": "wire.rank ^ 1"},
    killer=NARRATED + "test_recursive_doubling_equals_one_process",
)

mutant(
    "gather_backward_without_a_sum",
    "With sequence parallel gradients are too small: an all-gather's backward leaves out all other ranks.",
    target="comm.functions.gather_tokens",
    changes={"InFlightReduceScatter(grad, dim, group).wait()": "own_shard(grad, dim, group)"},
    killer=FUNCTIONS + "test_each_pair_is_what_autograd_finds_on_one_process[3]",
)

mutant(
    "group_waits_half_an_hour",
    "A rank waits for half an hour in a group of the user's, although the job's own gives up after seconds.",
    target="comm.wire.groups.wait_for",
    changes={"work.wait(timeout_of(group))": "work.wait()"},
    killer="tests/hybrid_parallel/test_mesh.py::test_a_rank_gives_up_in_any_group_after_the_jobs_timeout",
    symptom="One rank hangs, and the others notice it only after half an hour, whatever OP_TIMEOUT says.",
    fails_with="keeps the others waiting",
)

mutant(
    "halving_divides_each_round",
    "Means are too small with halving-doubling: every round divides by the number of ranks.",
    target="comm.algorithms.hypercube.halving_doubling",
    changes={
        "divide_if_mean(op, tensor[start:end], wire.size)": "",
        "combine(op, mine, arrived, out=mine)": (
            "combine(op, mine, arrived, out=mine)\ndivide_if_mean(op, mine, wire.size)"
        ),
    },
    killer=NARRATED + "test_halving_doubling_equals_one_process",
    cause="divided by their number once too often",
)

mutant(
    "mean_divided_twice",
    "Gradients are too small by the number of ranks: with SGD training is slow, and Adam hides the error.",
    target="comm.algorithms.reduction.divide_if_mean",
    changes={"reduced.div_(ranks)": "reduced.div_(ranks).div_(ranks)"},
    killer=COLLECTIVES_BY_HAND + "test_a_mean_is_divided_by_the_number_of_ranks_once",
    symptom="With SGD training on many ranks is slow, and with Adam the loss looks normal.",
)

mutant(
    "mean_overflows_in_fp16",
    "Gradients of an fp16 model are inf where DDP's are finite: ranks add first and divide later.",
    target="comm.algorithms.reduction.divisor_before",
    changes={"dtype == torch.float16": "dtype == torch.bfloat16"},
    killer=COLLECTIVES + "test_a_mean_of_float16_that_fits_does_not_overflow_though_the_sum_would",
)

mutant(
    "pairwise_own_part_missing",
    "Each rank loses its own part of an all-to-all: there is no message for it, and no copy either.",
    target="comm.algorithms.pairwise.all_to_all",
    changes={"incoming[r].copy_(outgoing[r])": ""},
    killer=NARRATED + "test_pairwise_all_to_all_equals_one_process",
    symptom="After an all-to-all a part of the result is garbage.",
)

mutant(
    "reduce_scatter_neighbours_shard",
    "A sharded optimizer diverges: each rank gets the gradients of its neighbour's shard.",
    target="comm.algorithms.ring.reduce_scatter",
    changes={
        "reduce_chunks(wire, chunks, op)": (
            "chunks = chunks[1:] + chunks[:1]\nreduce_chunks(wire, chunks, op)"
        ),
    },
    killer=COLLECTIVES_BY_HAND + "test_a_reduce_scatter_gives_each_rank_its_own_shard",
)

mutant(
    "ring_chunk_off_by_one",
    "All-reduced gradients are wrong and differ by rank: the loss is noise, and replicas drift apart.",
    target="comm.algorithms.pipelined_ring.chunk_sent",
    changes={"(rank - 1 - step) % n": "(rank - step) % n"},
    killer=COLLECTIVES_BY_HAND + "test_a_ring_all_reduce_adds_up_all_ranks_in_every_chunk",
)

mutant(
    "sharded_tree_forgets_grandchildren",
    (
        "Rank 3 of four gets zeros from a scatter: rank 2, which sends to it, was sent its own shard "
        "and no more."
    ),
    target="comm.algorithms.sharded_tree.scatter",
    changes={
        "shard.new_empty(sum(sizes))": "shard.new_zeros(sum(sizes))",
        "wire.irecv(block, parent)": "wire.irecv(block[: len(shard)], parent)",
        "wire.isend(part, child)": "wire.isend(part[: shard_sizes(numel, wire.size)[child]], child)",
    },
    killer=COLLECTIVES_BY_HAND + "test_a_tree_scatters_to_each_rank_its_own_shard_from_every_root",
    cause="Only zeros arrive",
    symptom="After a scatter by tree some ranks have zeros: on two ranks none, on four ranks one.",
)

mutant(
    "shards_as_chunk_makes_them",
    "With 5 ranks and 6 elements two ranks get nothing: torch.chunk rounds up, so the last shards are empty.",
    target="comm.shards.shard_sizes",
    changes={
        "base, longer = divmod(numel, ranks)\nreturn [base + (rank < longer) for rank in range(ranks)]": (
            "longest = -(-numel // ranks)\n"
            "return [min(longest, max(0, numel - rank * longest)) for rank in range(ranks)]"
        ),
    },
    killer=COST + "test_a_tensor_is_divided_as_by_tensor_split_and_its_segments_cover_it",
)

mutant(
    "tensor_sum_reduced_again",
    "Gradients below a row layer are n times too large, below two n * n times; Adam hides the error.",
    target="comm.functions.sum_over_ranks",
    changes={"lambda grad: grad": "lambda grad: summed(grad, group)"},
    killer=FUNCTIONS + "test_the_backward_of_a_sum_is_the_identity_and_that_of_a_copy_a_sum",
)

mutant(
    "textbook_ring_adds_only_the_last_arrival",
    "Sums are right on two ranks and too small on more: a chunk has the contributions of two ranks only.",
    target="comm.algorithms.ring.reduce_chunks",
    changes={
        "n, r = wire.size, wire.rank": (
            "n, r = wire.size, wire.rank\nown = [chunk.clone() for chunk in chunks]"
        ),
        "outgoing, mine = chunks[": "outgoing, mine = own[",
    },
    killer=NARRATED + "test_ring_all_reduce_equals_one_process",
)

mutant(
    "textbook_ring_sends_the_wrong_chunk",
    "Ranks end with different results: partial sums are passed on, and overwrite the complete chunks.",
    target="comm.algorithms.ring.gather_chunks",
    changes={
        "chunks[(r - step) % n], chunks[(r - 1 - step) % n]": (
            "chunks[(r - 1 - step) % n], chunks[(r - 2 - step) % n]"
        ),
    },
    killer=NARRATED + "test_ring_all_reduce_equals_one_process",
    symptom="After an all-reduce the ranks have different results.",
)

mutant(
    "tree_reduce_in_place",
    "A reduce to rank 0 overwrites the tensors of the other ranks with partial sums.",
    target="comm.algorithms.tree.reduce",
    changes={"if parent is not None and children:\n    tensor = tensor.clone()": ""},
    killer=COLLECTIVES_BY_HAND + "test_a_reduce_does_not_change_the_other_ranks_tensors",
)

mutant(
    "tree_root_not_rotated",
    (
        "A broadcast from rank 2 sends rank 0's tensor: a checkpoint that another rank has read is "
        "silently lost."
    ),
    target="comm.algorithms.tree.family",
    changes={
        "(wire.rank - root) % wire.size": "wire.rank",
        "(position - reach + root) % wire.size": "position - reach",
        "(position + reach + root) % wire.size": "position + reach",
    },
    killer=COLLECTIVES_BY_HAND + "test_a_tree_broadcasts_from_every_root",
    symptom="A broadcast from rank 2 does not send rank 2's tensor.",
)

mutant(
    "tree_sends_to_all_children_at_once",
    "A broadcast by tree is slower than its formula: a rank's messages share its link, and all arrive late.",
    target="comm.algorithms.tree.broadcast",
    changes={
        "for child in children:\n    wire.isend(tensor, child).wait()": (
            "for transfer in [wire.isend(tensor, child) for child in children]:\n    transfer.wait()"
        ),
    },
    killer=COLLECTIVES_BY_HAND + "test_a_tree_sends_to_the_largest_subtree_first_and_to_one_child_at_a_time",
    symptom=(
        "A broadcast of a large tensor by tree takes longer than its formula says, on links of one speed."
    ),
)
