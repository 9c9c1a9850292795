"""Exercises of lesson 3: a weight matrix is divided among ranks."""

from exercises.catalog.exercise import Exercise

LAYERS = "tests/tensor_parallel/test_layers.py::"
NARRATED = "tests/tensor_parallel/test_narrated.py::"
CROSS_ENTROPY = "tests/tensor_parallel/test_cross_entropy.py::"
WRAPPERS = "tests/test_wrappers.py::"
PARALLELIZE = "tests/tensor_parallel/test_parallelize.py::"

EXERCISES = (
    Exercise(
        name="column_parallel",
        title="The column-parallel layer",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.layers.column_parallel",
        also=("tensor_parallel.layers.full_input",),
        tests=(
            NARRATED + "test_tensor_parallel_equals_one_process",
            NARRATED + "test_sequence_parallel_equals_one_process",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[2]",
            LAYERS + "test_without_overlap_a_backward_reduces_the_inputs_gradient_once_for_several_layers",
            LAYERS + "test_layers_communicate_within_the_given_group_only[3]",
        ),
        difficulty=2,
        minutes=25,
        needs=("conjugate_functions",),
        doc="""
            Apply layers of equal options (q, k and v) to one input, whose gradient is then reduced once.

            Each layer has this rank's n-th of the outputs. If `layer.overlap`, OverlappedColumn does all of
            it. Otherwise the full input is made once for all layers.
        """,
        docs={
            "full_input": """
                Return the full input of a column-parallel layer, from which each rank computes other outputs.

                Without sequence parallelism every rank has the same x, in full. With it x is this rank's
                shard of the tokens, along TIME. The gradient that a rank computes for the full input is one
                term of it.
            """,
        },
        helps=(
            "layer.weight: nn.Parameter, layer.bias: nn.Parameter | None",
            "layer.group: Group, layer.sequence_parallel: bool, layer.overlap: bool",
            "OverlappedColumn.apply(x, group, sequence_parallel, *weights, *biases) -> tuple[Tensor, ...]",
        ),
        hints=(
            "A rank computes its own outputs from the full input and its part of the weight: F.linear, "
            "without any other rank. What is the gradient of x that it finds alone?",
            "The gradient of x is a sum over all outputs, and a rank has only some of them. So the terms of "
            "all ranks must be added up in the backward. One function of comm.functions does that and "
            "nothing in the forward.",
            "full_input: gather_tokens(x, TIME, group) with sequence parallelism, else copy_to_ranks(x, "
            "group). Call it once for all layers: a call for each of q, k and v would send three gradients.",
        ),
    ),
    Exercise(
        name="row_parallel",
        title="The row-parallel layer",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.layers.RowParallelLinear.forward",
        tests=(
            NARRATED + "test_tensor_parallel_equals_one_process",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[2]",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[3]",
            LAYERS + "test_the_bias_of_a_row_layer_is_added_once",
            LAYERS + "test_layers_communicate_within_the_given_group_only[3]",
            NARRATED + "test_sequence_parallel_equals_one_process",
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return the layer's full output from this rank's n-th of the inputs.

            With sequence parallelism a rank gets the output for its tokens only, which are divided along
            TIME, dim 1 of x. Otherwise every rank gets the output for all tokens.
        """,
        helps=(
            "self.weight: nn.Parameter, self.bias: nn.Parameter | None",
            "self.group: Group, self.sequence_parallel: bool",
        ),
        hints=(
            "This rank's inputs times this rank's part of the weight give a term of every output. The output "
            "is the sum of the terms of all ranks.",
            "F.linear(x, self.weight) is the term, without the bias. If every rank added the bias to its "
            "term, how often would the sum contain it?",
            "Compute the term; sum it with scatter_sums(term, TIME, self.group) or with sum_over_ranks(term, "
            "self.group); and add the bias to the sum.",
        ),
    ),
    Exercise(
        name="vocabulary_parallel",
        title="The vocabulary-parallel embedding",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.layers.VocabParallelEmbedding.forward",
        tests=(
            LAYERS + "test_an_embedding_finds_each_token_on_the_rank_that_owns_it[2]",
            LAYERS + "test_an_embedding_finds_each_token_on_the_rank_that_owns_it[3]",
            LAYERS + "test_a_token_outside_of_the_vocabulary_is_refused_on_all_ranks",
            LAYERS + "test_layers_communicate_within_the_given_group_only[3]",
        ),
        difficulty=2,
        minutes=20,
        needs=("row_parallel",),
        doc="""
            Return the embeddings of tokens, of which each rank holds an n-th of the vocabulary.

            With sequence parallelism a rank gets the embeddings of its tokens only, which are divided along
            TIME.
        """,
        helps=(
            "self.weight: nn.Parameter\n    This rank's rows.",
            "self.group: Group, self.vocab_size: int, self.sequence_parallel: bool",
        ),
        hints=(
            "A rank can look up only the tokens whose rows it holds. What must it contribute for the others, "
            "so that the sum over ranks is right?",
            "Look up all rows with F.embedding(rows, self.weight), and make those of other ranks' tokens "
            "zero. Row 0 is a valid row, so the lookup alone gives them the wrong embedding.",
            "Multiply the embeddings by is_own.unsqueeze(-1). Then sum over ranks, with scatter_sums(term, "
            "TIME, self.group) or sum_over_ranks(term, self.group).",
        ),
    ),
    Exercise(
        name="open_tensor_parallel",
        title="Two parallel layers from nothing",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.layers.ColumnParallelLinear",
        also=("tensor_parallel.layers.RowParallelLinear",),
        tests=(
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[2]",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[1]",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[3]",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[4]",
            LAYERS + "test_layers_communicate_within_the_given_group_only[2]",
            LAYERS + "test_forward_and_backward_send_one_all_reduce_each",
        ),
        difficulty=3,
        minutes=60,
        needs=("column_parallel", "row_parallel"),
        stub='''
            import torch
            from torch import nn

            from comm.collectives import all_reduce


            class ColumnParallelLinear(nn.Module):
                """Computes an n-th of a plain layer's outputs: (..., inputs) to (..., outputs/n).

                `plain` is an nn.Linear that is equal on all ranks, whose outputs n divides. `weight` and
                `bias` are this rank's parts of its parameters. All ranks have the same input, and after a
                backward the same gradient of it, which is that of one process.
                """

                def __init__(self, plain, group=None):
                    raise NotImplementedError


            class RowParallelLinear(nn.Module):
                """Computes all outputs from an n-th of the inputs: (..., inputs/n) to (..., outputs).

                `weight` is this rank's part of the plain layer's weight, and `bias` its whole bias, which has
                on all ranks the gradient of one process. All ranks get the same output, and compute the same
                loss from it. The two layers together send one all-reduce in the forward, of the output, and
                one in the backward, of the input's gradient.
                """

                def __init__(self, plain, group=None):
                    raise NotImplementedError
        ''',
        hints=(
            "Write y = A(x) and z = B(y) as blocks of matrices: which block of A's rows, and which of B's "
            "columns, can a rank use without any message? What is each rank's part of z?",
            "Two torch.autograd.Functions are enough: one that changes nothing forward and adds up gradients "
            "backward, and one that adds up forward and changes nothing backward.",
            "All-reduce a clone, because all_reduce works in place. The bias of the second layer is added "
            "after the sum, so that it counts once.",
        ),
    ),
    Exercise(
        name="cross_entropy",
        title="The vocabulary-parallel cross entropy",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.cross_entropy._CrossEntropy.forward",
        also=("tensor_parallel.cross_entropy._CrossEntropy.backward",),
        tests=(
            NARRATED + "test_vocabulary_parallel_equals_one_process",
            CROSS_ENTROPY + "test_loss_and_gradient_equal_torchs_for_the_full_logits[2]",
            CROSS_ENTROPY + "test_a_rank_whose_entries_are_all_padding_has_no_probability",
            CROSS_ENTROPY + "test_huge_logits_do_not_overflow_wherever_the_largest_is",
        ),
        difficulty=5,
        minutes=60,
        needs=("vocabulary_parallel",),
        doc="""
            Return the mean loss over the targets that are not `ignore`, the same on every rank.

            A rank has the logits of v entries of the vocabulary; those from `vocab_size` on are padding, and
            have no probability. own_rows(tokens, v, vocab_size, group) returns for each target its
            column here, and whether it has one; an ignored target may stand for entry 0. The loss of a token
            is log(sum of exp(logit - max)) + max - logit of the target. The logits of 16-bit dtypes are
            computed with in float32. Save in `ctx` what the backward needs.
        """,
        docs={
            "backward": """
                Return the gradient of this rank's logits, and None for each other argument of forward.

                `grad` is the gradient of the mean loss. The result has the shape and dtype of the logits.
                Nothing has to be sent.
            """,
        },
        hints=(
            "No rank has all logits of a token, but each number in the loss is a maximum or a sum over the "
            "vocabulary. So each rank computes its own, for each token, and the ranks reduce them: one "
            "all-reduce with op='max', then one for two sums.",
            "Subtract the maximum of all ranks before exp. A target's logit is on one rank, and the others "
            "add 0. Stack the sums of exp and the targets' logits in one tensor, so that one all-reduce is "
            "enough. A rank may have only padding: then its maximum is -inf.",
            "Backward: the gradient of a logit is its probability, exp / total, and 1 less at the target, "
            "which scatter_add_ can subtract. Multiply by grad / number of targets that count, and by 0 "
            "where a target is ignored. Padding gets 0.",
        ),
    ),
    Exercise(
        name="sequence_parallel",
        title="Gradients of one rank's tokens",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.parallelize.TensorParallel.with_own_tokens_only",
        also=("tensor_parallel.parallelize.TensorParallel.finish_gradient_sync",),
        tests=(
            WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[sequence]",
            WRAPPERS + "test_two_ranks_divide_a_model_or_its_tokens_and_train_as_one_process[tensor]",
            PARALLELIZE + "test_gradients_count_once_however_backwards_and_synchronisation_alternate",
        ),
        difficulty=3,
        minutes=30,
        needs=("column_parallel", "row_parallel"),
        doc="""
            Return the parameters whose gradient on this rank comes from this rank's tokens only.
        """,
        docs={
            "finish_gradient_sync": """
                Add up the gradients of which each rank has one term; complete ones stay as they are.

                A hook has multiplied each term by the number of ranks.
            """,
        },
        helps=(
            "self.plain: nn.Module, self.group: Group, self.sequence_parallel: bool",
            "self.inner: ModelOnRank\n    "
            "What is wrapped. It completes the gradients of the other axes: inner.finish_gradient_sync().",
            "self.dims: dict[str, tuple[int, int]]\n    "
            "By their names in the plain model, the parameters that the ranks divide.",
            "self.held: dict[nn.Parameter, Tensor] | None\n    "
            "With ZeRO, the shards of trained parameters: theirs are the gradients.",
        ),
        hints=(
            "With sequence parallelism a rank normalises its own tokens, adds the row layers' biases to its "
            "own tokens, and embeds positions of its own tokens. Which parameters are these? All that every "
            "rank has in full.",
            "Without sequence parallelism every rank has all tokens outside of the divided layers, so its "
            "gradients are complete: the list is empty. With it, the list has the parameters whose names "
            "are not in self.dims.",
            "The mean of n times a term, over n ranks, is the sum of the terms. And the mean of gradients "
            "that are equal on all ranks changes nothing, so a second call does no harm.",
        ),
    ),
)
