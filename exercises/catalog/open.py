"""Open exercises: a specification and a signature, and all else is the learner's. Graded by behaviour alone.

`stub` is the learner's file but for its first docstring. The names that it imports from the lessons are the
helpers that the docstring lists. The tests are in tests/LESSON/test_behaviour.py, and know nothing of how the
lesson's own code works: tests/exercises/other_ways.py solves each exercise in another way.
"""

from exercises.catalog.comm import MESSAGES, WIRE
from exercises.catalog.exercise import Exercise


def _tests(lesson: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{lesson}/test_behaviour.py::test_{name}" for name in names)


EXERCISES = (
    Exercise(
        name="open_all_reduce",
        title="An all-reduce of your own",
        notebook="03_cost_of_a_message",
        target="comm.algorithms.ring.all_reduce",
        tests=_tests(
            "comm",
            "two_ranks_have_the_sum_of_both",
            "all_ranks_have_the_reduction_of_all",
            "no_rank_sends_more_than_in_a_ring",
        ),
        difficulty=3,
        minutes=45,
        needs=("ring_all_reduce",),
        helps=(*WIRE, *MESSAGES),
        stub='''
            import torch


            def all_reduce(wire, full, op):
                """Replace every rank's flat tensor `full` by the reduction of all ranks' tensors.

                `op` is "sum", "mean", "max", "min" or "product". There may be any number of ranks, and fewer
                elements than ranks. With n ranks and S bytes no rank sends more than 2(n-1) messages and,
                where n divides the elements, 2(n-1)/n S bytes. Do not send a tensor without elements.
                """
                raise NotImplementedError
        ''',
        hints=(
            "If one rank collected everything, it would send (n-1) S bytes. How can all ranks reduce at the "
            "same time, each a part of the tensor?",
            "After a reduce-scatter rank r has the reduction of chunk r. How many bytes has it sent by then? "
            "What is left is an all-gather of the chunks.",
            "Either pass partial sums round a ring, or send chunk p directly to rank p, add up what arrives, "
            "and send the sum to all. Both send 2(n-1) chunks. full.tensor_split(n) gives views.",
        ),
    ),
    Exercise(
        name="open_naive",
        title="Data parallel from nothing",
        notebook="04_naive_data_parallel",
        target="data_parallel.train_naive.NaiveDataParallel",
        tests=_tests(
            "data_parallel",
            "naive_has_the_gradients_of_one_process",
            "naive_reduces_each_parameter_once",
            "naive_is_right_for_tied_frozen_and_unused_layers_and_for_microbatches",
        ),
        difficulty=2,
        minutes=30,
        needs=("naive_gradient_sync",),
        stub='''
            from torch import nn

            from comm.collectives import all_reduce, broadcast


            class NaiveDataParallel(nn.Module):
                """Wraps a module, so that ranks with different examples train it as one process would.

                All ranks begin with rank 0's parameters and buffers. Calling the wrapper calls `self.module`.
                After the last backward of a step the user calls `finish_gradient_sync()`: then each
                parameter's gradient is the mean over the ranks of `group`. A parameter that this rank has not
                used counts as zero; frozen ones have no gradient. Backwards before the last one run inside
                `with model.no_sync()`, and their gradients add up. The user divides the losses of
                microbatches, so that this sum is the gradient of the mean loss.
                """

                def __init__(self, module, group=None):
                    raise NotImplementedError

                def forward(self, *inputs, **named_inputs):
                    raise NotImplementedError

                def no_sync(self):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError
        ''',
        hints=(
            "What must be equal on all ranks before the first step so that equal gradients keep them equal?",
            "Ranks pair their collectives by the order of the calls. So all ranks must reduce the same "
            "parameters, also those that a rank has not used.",
            "`no_sync` has nothing to do here: contextlib.nullcontext() is enough. Buffers and parameters of "
            "a module that was drawn with another seed come from broadcast(tensor.data, root=0).",
        ),
    ),
    Exercise(
        name="open_buckets",
        title="Buckets and overlap from nothing",
        notebook="05_overlap_and_buckets",
        target="data_parallel.train_bucket_overlap.BucketDataParallel",
        tests=_tests(
            "data_parallel",
            "buckets_have_the_gradients_of_one_process",
            "a_message_carries_a_bucket_and_no_sync_sends_nothing",
            "buckets_are_sent_while_the_backward_computes",
            "buckets_are_right_for_tied_frozen_and_unused_layers_and_for_microbatches",
        ),
        difficulty=4,
        minutes=90,
        needs=("open_naive", "bucket_views", "launch_order"),
        stub='''
            import torch
            from torch import nn

            from comm.collectives import all_reduce, broadcast


            class BucketDataParallel(nn.Module):
                """Does what NaiveDataParallel does, in few messages that travel while the backward computes.

                Gradients share buckets, which are filled in the reverse order of `module.parameters()`: a
                bucket is full when it has `bucket_mb` MiB or more. Each bucket is one all-reduce, which
                starts in the last backward, as soon as all gradients of it and of the earlier buckets are
                complete. In `no_sync()` nothing is sent. `finish_gradient_sync()` waits for all.
                """

                def __init__(self, module, group=None, bucket_mb=1.0):
                    raise NotImplementedError

                def forward(self, *inputs, **named_inputs):
                    raise NotImplementedError

                def no_sync(self):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError
        ''',
        hints=(
            "parameter.register_post_accumulate_grad_hook(hook) calls hook(parameter) in a backward, when "
            "the gradient has been added. In which order do the parameters of a model come?",
            "Ranks may see gradients in different orders, and a rank may miss some. The buckets must leave "
            "in one order on all ranks, and those that no hook has completed in finish_gradient_sync().",
            "all_reduce(flat, 'mean', group, async_op=True) returns a handle. When all handles have been "
            "waited for, copy each part of the flat tensor into its parameter's gradient.",
        ),
    ),
    Exercise(
        name="zero1",
        title="ZeRO 1 from nothing",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero1.ZeroOptimizer",
        tests=_tests(
            "zero",
            "zero_1_trains_as_one_process",
            "zero_1_holds_an_nth_of_the_optimizer_and_sends_no_more_than_an_all_reduce",
            "zero_1_trains_odd_models_with_microbatches_on_three_ranks",
        ),
        difficulty=4,
        minutes=75,
        needs=("zero_shards",),
        stub='''
            import torch

            from comm.collectives import all_gather, broadcast, reduce_scatter


            class ZeroOptimizer:
                """Trains parameters with an `optimizer_class`, of whose state each rank has an n-th.

                `defaults` are the optimizer's options. All ranks begin with rank 0's parameters. A step is
                zero_grad(); backwards, all but the last inside `with optimizer.no_sync()`;
                finish_gradient_sync(); step(). Afterwards the parameters are what one process would have,
                with the mean of the ranks' gradients; an unused parameter counts as one with zeros, and
                frozen ones do not change. Between steps a rank has the parameters, memory for the gradients,
                and the optimizer's state of its n-th, and in a step it sends (n-1)/n of the gradients' bytes
                and (n-1)/n of the parameters'. You may assume that `optimizer_class` works element by
                element. The user divides the losses of microbatches.
                """

                def __init__(self, params, optimizer_class, group=None, **defaults):
                    raise NotImplementedError

                def zero_grad(self):
                    raise NotImplementedError

                def no_sync(self):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError

                def step(self):
                    raise NotImplementedError
        ''',
        hints=(
            "An all-reduce of the gradients is a reduce-scatter and an all-gather. Which of the two does an "
            "optimizer need that updates an n-th of the numbers?",
            "Let the parameters be views of one flat tensor, padded so that n divides it. An ordinary "
            "optimizer can train this rank's part of it: a nn.Parameter that shares the memory.",
            "reduce_scatter(own, flat, 'mean', group) gives this rank's part of the gradients, which is the "
            "gradient of the shard. After the inner step, all_gather(flat, own part, group) changes the "
            "model.",
        ),
    ),
    Exercise(
        name="zero2",
        title="ZeRO 2 from nothing",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero2.ZeroGradientOptimizer",
        tests=_tests(
            "zero",
            "zero_2_trains_as_one_process",
            "zero_2_holds_an_nth_of_gradients_and_optimizer_and_sends_no_more_than_an_all_reduce",
            "zero_2_trains_odd_models_with_microbatches_on_three_ranks",
        ),
        difficulty=3,
        minutes=45,
        needs=("zero1",),
        stub='''
            import torch

            from comm.collectives import all_gather, broadcast, reduce_scatter


            class ZeroGradientOptimizer:
                """Does what the optimizer of ZeRO 1 does, and keeps an n-th of the gradients only.

                Its methods are those of the exercise zero1. Between steps a rank has the parameters and, of
                the gradients and of the optimizer's state, its n-th. So a gradient of the model is freed when
                its part of the mean has reached the rank that owns it, at the latest in
                finish_gradient_sync().
                """

                def __init__(self, params, optimizer_class, group=None, **defaults):
                    raise NotImplementedError
        ''',
        hints=(
            "What holds memory for a gradient? Everything that still refers to it: the parameter's grad, "
            "a flat tensor, a view of one.",
            "A view keeps the whole flat tensor alive. This rank's part of the mean is a tensor of its own.",
            "Make the flat tensor of gradients in finish_gradient_sync(), reduce-scatter it into a new "
            "tensor of an n-th, and set the gradients of the parameters to None. Better: bucket by bucket, "
            "with a hook, so that never more than a few buckets are alive.",
        ),
    ),
    Exercise(
        name="zero3",
        title="ZeRO 3 from nothing",
        notebook="06_zero_and_fsdp",
        target="zero.train_zero3.FullyShardedDataParallel",
        tests=_tests(
            "zero",
            "zero_3_trains_as_one_process",
            "zero_3_holds_an_nth_of_all_and_sends_at_most_three_times_the_parameters",
            "zero_3_trains_odd_models_with_microbatches_on_three_ranks",
        ),
        difficulty=5,
        minutes=120,
        needs=("zero2",),
        stub='''
            import torch
            from torch import nn

            from comm.collectives import all_gather, broadcast, reduce_scatter


            class FullyShardedDataParallel(nn.Module):
                """Wraps a module of which each rank keeps an n-th: parameters, gradients, optimizer's state.

                All ranks begin with rank 0's parameters and buffers. `parameters()` are this rank's shards of
                those that are trained: an ordinary optimizer gets them. Calling the wrapper calls the module
                with full parameters. After the last backward of a step the user calls
                `finish_gradient_sync()`: then each shard's gradient is the mean over ranks, with zeros for
                what was not used. Backwards before the last one run inside `with model.no_sync()`.
                `full_state_dict()`, which all ranks call, returns the module's full state by its own names.
                Between steps a rank holds an n-th of everything, and in a step it sends at most (n-1)/n of
                three times the parameters' bytes.
                """

                def __init__(self, module, group=None):
                    raise NotImplementedError
        ''',
        hints=(
            "When does a rank need the full parameters, and when not? The forward and the backward need "
            "them, and the optimizer does not.",
            "tensor.untyped_storage().resize_(0) frees the memory of a flat tensor, also where autograd has "
            "kept views of it, and resize_(n) gives it memory again before it is filled.",
            "Gather in forward(), and free in finish_gradient_sync(): that is right, and sends twice the "
            "parameters' bytes with the reduce-scatter. To hold one block at a time, gather it in a forward "
            "hook and again in the backward, which makes three times.",
        ),
    ),
    Exercise(
        name="open_tensor_parallel",
        title="Two parallel layers from nothing",
        notebook="07_tensor_and_sequence_parallel",
        target="tensor_parallel.layers.ColumnParallelLinear",
        also=("tensor_parallel.layers.RowParallelLinear",),
        tests=_tests(
            "tensor_parallel",
            "two_ranks_compute_what_two_plain_layers_do",
            "any_number_of_ranks_computes_what_two_plain_layers_do",
            "forward_and_backward_send_one_all_reduce_each",
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
        name="gpipe_by_hand",
        title="A pipeline from nothing",
        notebook="08_pipelines",
        target="pipeline_parallel.train_afab.AllForwardAllBackward",
        tests=_tests(
            "pipeline_parallel",
            "two_stages_have_the_gradients_of_one_process",
            "four_stages_and_six_microbatches_have_the_gradients_of_one_process",
            "each_activation_and_each_gradient_is_one_message",
        ),
        difficulty=4,
        minutes=75,
        needs=("pipeline_gpipe",),
        stub='''
            import torch
            from torch import nn

            from comm.point_to_point import irecv, isend, recv, send


            class AllForwardAllBackward(nn.Module):
                """Trains a model whose stage r is on rank r, with several microbatches on their way.

                `stages` are modules, one for each rank; all ranks have all of them, equal, and rank r trains
                stages[r] only. `example` is a microbatch of the input. `loss_of(output, targets)` is the mean
                loss. `step(x, y)` divides a batch along dim 0 into `microbatches` equal parts, adds the
                gradients of the batch's mean loss to those of the rank's stage, and returns the loss on the
                last rank and None on others. An activation or its gradient is one message, so rank r sends
                `microbatches` messages to each neighbour.
                """

                def __init__(self, stages, microbatches, loss_of, example):
                    raise NotImplementedError

                def step(self, x, y):
                    raise NotImplementedError
        ''',
        hints=(
            "Who needs what from whom? Each receive needs a tensor of the right shape: what does the example "
            "tell about the shapes between the stages?",
            "A tensor that was received is a leaf: with requires_grad_() it gets the gradient that the rank "
            "before needs. Keep each microbatch's input and output until its backward.",
            "First all forwards, then all backwards: output.backward(gradient). The loss of a microbatch is "
            "divided by their number. Send detached, contiguous tensors with isend, and wait at the end.",
        ),
    ),
    Exercise(
        name="open_1f1b",
        title="A schedule from its properties",
        notebook="08_pipelines",
        target="pipeline_parallel.schedules.one_f_one_b",
        tests=_tests(
            "pipeline_parallel",
            "a_1f1b_table_can_run",
            "1f1b_idles_and_holds_no_more_than_the_formulas_say",
        ),
        difficulty=3,
        minutes=40,
        needs=("pipeline_1f1b",),
        stub='''
            from pipeline_parallel.actions import BACKWARD, FORWARD, Action


            def one_f_one_b(stages, microbatches):
                """Return a table of actions, one row for each rank; rank r runs stage r.

                A row has the forward and the backward of each microbatch, in the order in which the rank runs
                them. It has to be possible to run the table: a forward needs that of the stage before, and a
                backward that of the stage after. With p stages and m microbatches, rank r never holds more
                than p - r microbatches whose backward is still to come. If a backward takes twice as long as
                a forward, ranks idle for (p-1)/(m+p-1) of a step, as in GPipe.
                """
                raise NotImplementedError
        ''',
        hints=(
            "What is the last rank's row? It may hold one microbatch only. And that of the rank before it?",
            "You can also simulate: let each rank, whenever it is free, run a backward if one is ready, and "
            "else a forward, unless it would hold too many.",
            "Count in forwards: a forward takes one unit and a backward two. Which actions are ready at a "
            "time depends on when those of the neighbours have ended.",
        ),
    ),
    Exercise(
        name="open_ring_attention",
        title="Ring attention from nothing",
        notebook="11_long_sequences",
        target="context_parallel.train_ring_attention.ring_attention",
        tests=_tests(
            "context_parallel",
            "two_ranks_attend_as_one_process_does",
            "a_rank_sends_keys_and_values_round_the_ring_once_forward_and_twice_backward",
            "any_number_of_ranks_and_tokens_attends_as_one_process_does",
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
        name="open_moe",
        title="A mixture of experts from nothing",
        notebook="12_many_experts",
        target="expert_parallel.train_moe.MixtureOfExperts.forward",
        tests=_tests(
            "expert_parallel",
            "two_ranks_compute_what_one_process_does",
            "a_token_travels_only_to_its_experts",
            "a_token_may_pass_several_experts_of_any_ranks",
        ),
        difficulty=4,
        minutes=75,
        needs=("dispatch_and_combine",),
        helps=(
            "self.router(x) -> (probabilities, weights, experts)\n    Of tokens (t, d): (t, E), and of the k "
            "choices of each token their weights and experts, (t, k).",
            "self.experts: nn.ModuleDict\n    This rank's experts, by their numbers as text.",
            "self.moe.num_experts: int",
            "self.groups.experts: Group\n    Each of its n ranks has E/n experts.",
        ),
        stub='''
            import torch
            import torch.distributed as dist

            from comm.collectives import all_gather, all_to_all
            from comm.functions import exchange_shards


            def forward(self, x_btd):
                """Return for each token the weighted sum of what its k experts make of it, in x's shape.

                The experts lie on the ranks in order: rank 0 has the first E/n of them. A token travels only
                to ranks that have an expert of its choice, and its results come back. The result can be
                differentiated with respect to x and the experts' parameters, whose gradients then have the
                terms of all ranks' tokens. No token is dropped.
                """
                raise NotImplementedError
        ''',
        hints=(
            "Before tokens can travel, each rank has to know how many it will get from each other rank, and "
            "for which of its experts.",
            "Sort the t k choices by expert: then what goes to one rank is one piece, and within it what "
            "goes to one expert. exchange_shards(x, 0, group, sent, received) moves rows, also in the "
            "backward.",
            "all_to_all of the counts for each expert tells how many arrive. What arrives is in the order of "
            "ranks, and from each in the order of experts; the results must go back in the same order. Every "
            "rank must call the same exchanges, also one without tokens.",
        ),
    ),
)
