"""Exercises of lesson 3: a weight matrix is divided among ranks."""

from exercises.catalog.exercise import Exercise

LAYERS = "tests/tensor_parallel/test_layers.py::"
NARRATED = "tests/tensor_parallel/test_narrated.py::"

EXERCISES = (
    Exercise(
        name="row_parallel",
        title="The row-parallel layer",
        target="tensor_parallel.layers.RowParallelLinear.forward",
        tests=(
            NARRATED + "test_tensor_parallel_equals_one_process",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[2]",
            LAYERS + "test_a_column_and_a_row_layer_equal_two_plain_layers[3]",
            LAYERS + "test_the_bias_of_a_row_layer_is_added_once",
            LAYERS + "test_the_output_may_be_gathered_and_a_full_input_split",
            NARRATED + "test_sequence_parallel_equals_one_process",
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return the layer's full output from this rank's n-th of the inputs.

            With `self.split_input` x has all inputs: `split_to_ranks` takes this rank's n-th of dim -1. With
            `self.sequence_parallel` a rank gets the output for its tokens only, which are divided along
            TIME: `scatter_sums` reduces and scatters. Otherwise every rank gets the output for all tokens:
            `sum_over_ranks`. `self.bias` may be None.
        """,
        hints=(
            "This rank's inputs times this rank's part of the weight give a term of every output. The output "
            "is the sum of the terms of all ranks.",
            "F.linear(x, self.weight) is the term, without the bias. If every rank added the bias to its "
            "term, how often would the sum contain it?",
            "Split x if the layer was asked to; compute the term; sum it with scatter_sums(term, TIME, "
            "self.group) or with sum_over_ranks(term, self.group); and add the bias to the sum.",
        ),
    ),
    Exercise(
        name="vocabulary_parallel",
        title="The vocabulary-parallel embedding",
        target="tensor_parallel.layers.VocabParallelEmbedding.forward",
        tests=(
            LAYERS + "test_an_embedding_finds_each_token_on_the_rank_that_owns_it[2]",
            LAYERS + "test_an_embedding_finds_each_token_on_the_rank_that_owns_it[3]",
            LAYERS + "test_a_token_outside_of_the_vocabulary_is_refused_on_all_ranks",
        ),
        difficulty=2,
        minutes=20,
        needs=("row_parallel",),
        doc="""
            Return the embeddings of tokens, of which each rank holds an n-th of the vocabulary.

            `own_rows` returns for each token its row in this rank's weight, and whether it has one; a token
            that another rank holds gets row 0. With `self.sequence_parallel` a rank gets the embeddings of
            its tokens only, which are divided along TIME.
        """,
        hints=(
            "A rank can look up only the tokens whose rows it holds. What must it contribute for the others, "
            "so that the sum over ranks is right?",
            "Look up all rows with F.embedding(rows, self.weight), and make those of other ranks' tokens "
            "zero. Row 0 is a valid row, so the lookup alone gives them the wrong embedding.",
            "Multiply the embeddings by is_own.unsqueeze(-1). Then sum over ranks, with scatter_sums(term, "
            "TIME, self.group) or sum_over_ranks(term, self.group).",
        ),
    ),
)
