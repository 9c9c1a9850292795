"""Exercises of lesson 6: a long sequence is cut among ranks."""

from exercises.catalog.exercise import Exercise

BLOCKS = "tests/context_parallel/test_block_attention.py::"
CUTS = "tests/context_parallel/test_sequence_cut.py::"
EQUAL = "tests/context_parallel/test_equivalence.py::"
NARRATED = "tests/context_parallel/test_narrated.py::"
NOTEBOOK = "11_long_sequences"
TRAFFIC = "tests/context_parallel/test_traffic.py::"

EXERCISES = (
    Exercise(
        name="join_attention",
        title="Attention in parts",
        notebook=NOTEBOOK,
        target="context_parallel.block_attention.join_results",
        tests=(
            BLOCKS + "test_results_over_two_sets_of_keys_are_joined_to_that_over_both[fused]",
            BLOCKS + "test_joining_with_the_result_of_no_key_changes_nothing",
            BLOCKS + "test_scores_that_exp_cannot_hold_are_joined",
            NARRATED + "test_ring_attention_equals_one_process",
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return the attention over the keys of both results, and its log-sum-exp (b, h, t).

            `y` (b, h, t, e) is what queries have found among some keys, normalised over these keys alone,
            and `lse` (b, h, t) is the logarithm of the sum of the exponentials of their scores. `other_y`
            and `other_lse` are the same for other keys. Scores may be so large that exp of them is
            infinite.
        """,
        hints=(
            "Each result is a sum of exp(score) v, divided by the sum of exp(score) over its own keys. The "
            "joined result has to be divided by the sum over all keys. By which factor does each change?",
            "The sum over the keys of a result is exp(lse), so the sum over all keys is exp(lse) + "
            "exp(other_lse). Its logarithm is the new log-sum-exp: torch.logaddexp computes it without "
            "computing an exponential that is too large.",
            "With L for the new log-sum-exp, the factors are exp(lse - L) and exp(other_lse - L). They have "
            "no dim for e: unsqueeze(-1).",
        ),
    ),
    Exercise(
        name="zigzag_cut",
        title="A cut that balances a causal mask",
        notebook=NOTEBOOK,
        target="context_parallel.sequence_cut.SequenceCut.zigzag",
        also=("context_parallel.sequence_cut.SequenceCut.parts",),
        tests=(
            CUTS + "test_a_rank_has_its_piece_from_the_front_and_its_piece_from_the_back",
            CUTS + "test_with_the_zigzag_cut_all_ranks_compute_equally_many_pairs_in_each_step[4]",
            CUTS + "test_documents_leave_out_the_keys_of_other_documents",
            CUTS + "test_each_pair_that_may_attend_is_in_one_part_of_one_rank",
        ),
        difficulty=3,
        minutes=30,
        needs=("join_attention",),
        doc="""
            Return the cut of a sequence in which each rank has an early and a late chunk.

            `cls` takes one tuple of slices for each rank: first its early chunk, then its late one. All ranks
            shall have equally much to compute under a causal mask.
        """,
        docs={
            "parts": """
                Yield the parts of the attention of a rank's queries to the keys of rank `source`.

                Parts whose keys are all later than their queries are left out. If `documents` is given, a
                part has a mask, or is left out.
            """,
        },
        helps=(
            "self._placed(rank) -> Iterator[tuple[slice, slice]]\n    "
            "A rank's chunks: their positions in the sequence, and their places among its own tokens.",
        ),
        hints=(
            "A query attends to all tokens before it. So the work of a chunk grows with its position: the "
            "first chunk has least, the last chunk most. Which two of 2n chunks have together as much as "
            "any other two?",
            "Rank r has chunk r and chunk 2n-1-r. In `parts`, two different chunks lie completely before or "
            "after each other, so their part is computed in full or not at all. Which one is partly masked?",
            "For each own chunk and each visiting chunk: skip if is_causal and visiting.start > own.start. "
            "The part is causal if is_causal and the starts are equal. Then yield the part, or what _masked "
            "yields.",
        ),
    ),
    Exercise(
        name="ring_attention_forward",
        title="The ring of keys and values",
        notebook=NOTEBOOK,
        target="context_parallel.train_ring_attention.RingAttention.forward",
        tests=(
            NARRATED + "test_ring_attention_equals_one_process",
            EQUAL + "test_attention_and_its_gradients_equal_one_process_under_any_mask[1]",
            EQUAL + "test_attention_and_its_gradients_equal_one_process_under_any_mask[3]",
            EQUAL + "test_sequences_that_the_ranks_do_not_divide_leave_some_of_them_without_a_token[3]",
        ),
        difficulty=4,
        minutes=45,
        needs=("join_attention", "zigzag_cut"),
        doc="""
            Return the attention of this rank's queries to the keys of all ranks, in the queries' shape.

            `q` is (b, h, t, e); `k` and `v` may have fewer heads. Results are added up in at least float32.
            The backward expects q, k, v, the result in q's dtype and its log-sum-exp as saved tensors, and
            `ctx.sequence`.
        """,
        helps=(
            "sequence.parts(source) -> list[AttentionPart]\n    "
            "The attention to a rank's keys, in parts: slices part.queries and part.keys of the tokens.",
            "sequence.kernel.attend(q, k, v, part) -> tuple[Tensor, Tensor]\n    "
            "What the part's queries find among its keys, and their log-sum-exp.",
        ),
        hints=(
            "The queries stay, and keys and values visit them. What must a rank keep of a block when it "
            "has gone?",
            "A query's result over several blocks is joined from theirs: begin with zeros and a log-sum-exp "
            "of NO_KEY, which is that of no key.",
            "For source, kv in visits(torch.stack([k, v]), sequence), for each part: attend "
            "with q[:, :, part.queries] and the two tensors of kv[:, :, :, part.keys], and assign "
            "join_results(...) to these rows of y and lse.",
        ),
    ),
    Exercise(
        name="open_ring_attention",
        title="Ring attention from nothing",
        notebook="11_long_sequences",
        target="context_parallel.train_ring_attention.ring_attention",
        tests=(
            EQUAL + "test_attention_equals_one_process[queries meet all keys and gradients come home]",
            TRAFFIC + "test_a_rank_sends_keys_and_values_round_the_ring_once_forward_and_twice_backward",
            EQUAL + "test_attention_equals_one_process[four ranks and uneven chunks]",
        ),
        difficulty=5,
        minutes=120,
        needs=("ring_attention_forward",),
        helps=(
            "sequence.rank: int, sequence.size: int\n    This rank's number, and the number of ranks.",
            "sequence.cut.positions(rank) -> Tensor\n    The positions of a rank's tokens in the sequence.",
        ),
        stub='''
            import torch

            from comm.point_to_point import InFlightShift


            def ring_attention(q, k, v, sequence, dropout=0.0):
                """Return the causal attention of this rank's queries to the keys of all ranks, as q's shape.

                q, k and v are (b, h, t, e), of this rank's tokens; ranks may have different numbers of them.
                A query attends to the keys of its own position and of all before it, with scores
                q k / sqrt(e). The result can be differentiated. Keys and values travel round the ring: in the
                forward a rank sends n-1 times those of one rank, and in the backward at most 2n-1 times.
                There is no dropout.
                """
                raise NotImplementedError
        ''',
        hints=(
            "Attention to a part of the keys, with the logarithm of its sum of exponentials, can be joined "
            "with that to another part. So a rank need not have all keys at a time.",
            "In the backward keys and values go round once more, and their gradients behind them: each rank "
            "adds its term, and the last one sends them home.",
            "With p = exp(score - lse) and D = sum of dy y: dv = p^T dy, ds = p (dy v^T - D), dq = ds k / "
            "sqrt(e), dk = ds^T q / sqrt(e). No rank needs more than the block that is there.",
        ),
    ),
    Exercise(
        name="all_to_all_heads",
        title="Tokens for heads",
        notebook=NOTEBOOK,
        target="context_parallel.train_all_to_all_attention.all_tokens_of_own_heads",
        also=("context_parallel.train_all_to_all_attention.all_heads_of_own_tokens",),
        tests=(
            NARRATED + "test_all_to_all_attention_equals_one_process",
            EQUAL + "test_attention_and_its_gradients_equal_one_process_under_any_mask[2]",
            EQUAL + "test_sequences_that_the_ranks_do_not_divide_leave_some_of_them_without_a_token[4]",
        ),
        difficulty=3,
        minutes=35,
        doc="""
            Send each of n ranks its heads of this rank's tokens; return (b, h, all tokens, e) of own heads.

            `x_bnhte` is (batch, ranks, heads of a rank, own tokens, e). The ranks' tokens are in the order of
            the sequence.
        """,
        docs={
            "all_heads_of_own_tokens": """
                Send each rank its tokens of this rank's heads; return (b, all heads, own tokens, e).

                `y_bhte` has all tokens of this rank's heads.
            """,
        },
        helps=(
            "sequence.size: int, sequence.lengths: list[int]\n    "
            "The number of ranks, and of each rank's tokens.",
        ),
        hints=(
            "An all-to-all cuts a tensor along one dim, and joins what arrives along the same dim. What "
            "must lie along that dim, so that a chunk of it goes to one rank as a whole?",
            "First: bring ranks and tokens to the front, and flatten the two into one dim of n * own "
            "entries, of which each rank gets `own`. From rank r come lengths[r] entries, and together they "
            "are the tokens of the sequence in order.",
            "Second: cut y along its tokens, lengths[p] of them to rank p. From each rank arrive `own` "
            "tokens of its heads, one rank's behind the other's along the dim of tokens: unflatten that dim "
            "to (n, own), and move n in front of the heads.",
        ),
    ),
)
