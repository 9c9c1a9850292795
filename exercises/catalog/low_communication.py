"""Exercises of lesson 8: sending less often, fewer bits, and less far."""

from exercises.catalog.exercise import Exercise

NARRATED = "tests/low_communication/test_narrated.py::"
AVERAGING = "tests/low_communication/test_averaging.py::"
COMPRESSED = "tests/low_communication/test_compressed.py::"
WRAPPERS = "tests/test_wrappers.py::"
HSDP = "tests/low_communication/test_hsdp.py::"
OF_WHAT_WAS_SENT = (
    COMPRESSED + "test_all_ranks_get_the_mean_of_what_ranks_have_sent_and_the_bytes_are_the_formulas"
)

EXERCISES = (
    Exercise(
        name="local_sgd_average",
        title="The average of replicas",
        notebook="13_sending_less",
        target="low_communication.train_local_sgd.LocalSGD.average",
        tests=(
            NARRATED + "test_averaging_parameters_is_averaging_gradients_for_one_step_only",
            AVERAGING + "test_the_mean_is_over_the_ranks_of_a_group[local SGD]",
            AVERAGING + "test_local_sgd_sends_a_rings_bytes_once_in_h_steps",
            AVERAGING + "test_two_ranks_equal_workers_in_one_process[local SGD]",
        ),
        difficulty=1,
        minutes=15,
        doc="""
            Replace each tensor that is to be averaged by its mean over the ranks, and begin a new round.

            All ranks call it at the same time. The tensors travel together: a step should not pay the latency
            of a message for each of them.
        """,
        helps=(
            "self.averaged(optimizer) -> list[Tensor]\n    The tensors to average: parameters, and what the "
            "user wants of the optimizer's state.",
            "self.steps: int\n    The steps since the last average.",
            "self.group: Group\n    It is passed on to all_reduce.",
        ),
        hints=(
            "The ranks must hold equal parameters after an average. What else belongs to one rank, and stays "
            "as it is unless self.averaged returns it?",
            "Join all tensors into one flat tensor, and average that with one all_reduce. Afterwards each "
            "tensor takes back its part. The tensors are the parameters themselves, so write into them.",
            "torch.cat([tensor.flatten() for tensor in tensors]) joins, flat.split([numbers of elements]) "
            "divides, and tensor.copy_(part.view_as(tensor)) writes. Parameters change without autograd: "
            "torch.no_grad(). In the end self.steps = 0.",
        ),
    ),
    Exercise(
        name="outer_step",
        title="A change of parameters as a gradient",
        notebook="13_sending_less",
        target="low_communication.train_diloco_plain.DiLoCo.outer_step",
        tests=(
            NARRATED + "test_diloco_takes_the_mean_change_of_the_ranks_as_a_gradient",
            AVERAGING + "test_the_mean_is_over_the_ranks_of_a_group[DiLoCo]",
            AVERAGING + "test_an_outer_step_sends_a_rings_bytes_and_a_step_nothing",
            AVERAGING + "test_two_ranks_equal_workers_in_one_process[DiLoCo]",
        ),
        difficulty=2,
        minutes=20,
        needs=("local_sgd_average",),
        doc="""
            Let the outer optimizer take a step with the ranks' mean change, and go on from where it leads.

            A rank's change is anchor - parameters. The outer optimizer trains the anchor, and takes the mean
            change over the ranks for its gradient. Afterwards all ranks have the new anchor as parameters.
        """,
        helps=(
            "self.anchor: Tensor\n    Flat: the parameters after the last outer step.",
            "self.outer: torch.optim.SGD\n    The outer optimizer; it has one parameter, self.anchor.",
            "self.flat() -> Tensor\n    A flat copy of the parameters as they are now.",
            "self.trained: list[Parameter]\n    The parameters, in the order of the flat tensor.",
            "self.group: Group\n    It is passed on to all_reduce.",
        ),
        hints=(
            "Two ranks began at an anchor of 5, and are at 4 and 3. What is the mean change, and in which "
            "direction must the anchor go? With a rate of 1 and no momentum, where should it end?",
            "An optimizer reads the gradient of its parameter from `.grad`. So the mean change goes there, "
            "before self.outer.step(), which moves the anchor in place.",
            "self.anchor.split([numbers of elements]) has the new values, one tensor for each of "
            "self.trained, and parameter.data.copy_(values.view_as(parameter)) writes them without "
            "autograd.",
        ),
    ),
    Exercise(
        name="int8_scale",
        title="255 levels and a scale",
        notebook="13_sending_less",
        target="low_communication.compressors.pack",
        also=("low_communication.compressors.unpack",),
        tests=(
            COMPRESSED + "test_int8_rounds_by_at_most_half_a_scale_of_the_ranks_own_block",
            OF_WHAT_WAS_SENT,
        ),
        difficulty=2,
        minutes=20,
        doc="""
            Return rows of 1,028 bytes (uint8) for rows of 1,024 float32 numbers.

            A row begins with a level for each number, in int8 from -127 to 127, and ends with the scale of
            these numbers, in float32. A level times the scale is about the number: the scale is as small as
            the levels allow, and each level is the nearest one. A row of zeros becomes zeros.
        """,
        docs={"unpack": "Return the numbers of packed rows: float32, 1,024 in a row."},
        hints=(
            "The largest number of a row, in size, needs the level 127 or -127. What does that say of the "
            "scale? What becomes of 0 / 0?",
            "blocks.abs().amax(1, keepdim=True) / 127 has a scale for each row. Divide by 1 where it is 0. "
            "round() before to(torch.int8), which cuts off what is behind the point.",
            "tensor.view(torch.uint8) shows the same bytes, four for each float32 number, so "
            "torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], dim=1) makes the rows. Back: "
            "rows[:, :BLOCK].view(torch.int8), and for the scales rows[:, BLOCK:].clone().view("
            "torch.float32), which needs bytes of its own.",
        ),
    ),
    Exercise(
        name="powersgd_passes",
        title="Two thin matrices",
        notebook="13_sending_less",
        target="low_communication.compressors.PowerSGD.mean",
        tests=(
            COMPRESSED + "test_powersgd_is_exact_if_the_mean_has_few_dimensions_and_for_zeros",
            OF_WHAT_WAS_SENT,
            COMPRESSED + "test_powersgd_equals_pytorchs_hook_from_the_same_state",
        ),
        difficulty=4,
        minutes=45,
        doc="""
            Replace `flat`, a bucket of gradients, by an approximation of its mean; return what this rank has
            contributed.

            Each matrix M, of n x m, becomes P Q^T. P (n x r) has orthonormal columns, which span those of the
            mean of M times the last step's Q. The new Q (m x r) is the mean of M^T P. Only such thin
            matrices travel, and what has no Q, which is averaged as it is: two messages in all. A step
            whose gradients are zeros must not spoil the next one.

            The mean of what the ranks have contributed is the result. Compute in self.dtype; what you return
            has the dtype of `flat`.
        """,
        helps=(
            "self.qs: dict[int, Tensor]\n    The Q of each matrix that has one, by the tensor's number in "
            "the bucket. Keep the new ones there.",
            "self._matrices(flat) -> list[Tensor]\n    A view of each tensor in the bucket, as a matrix.",
            "self._average(tensors: list[Tensor])\n    Replace tensors by their means over the ranks, all in "
            "one message.",
            "self.dtype: torch.dtype",
        ),
        hints=(
            "The mean of M Q over ranks is (mean of M) Q, so thin matrices are averaged in place of full "
            "ones. All ranks have one P, and Q is linear in M: which Q, if you use it in P Q^T, gives this "
            "rank's contribution? And if a Q is zeros, what does orthonormal(Q) have?",
            "Take a copy of the bucket for what this rank has contributed, and views of both with "
            "self._matrices. For i, q in self.qs.items(), P is matrices[i] @ orthonormal(q.to(bucket)). "
            "Average all P and the matrices without a Q at once, then make each P orthonormal.",
            "Q is matrices[i].T @ P. Before these are averaged, write P @ Q.T into the copy's view; after "
            "it, into the bucket's: view.copy_(...). Keep the averaged Q in self.qs. In the end "
            "flat.copy_(bucket), and return the copy in flat's dtype.",
        ),
    ),
    Exercise(
        name="error_feedback",
        title="Compressed gradients with error feedback, from nothing",
        notebook="13_sending_less",
        target="low_communication.train_compressed.CompressedDataParallel",
        tests=(
            COMPRESSED + "test_what_a_step_has_not_sent_is_sent_later",
            COMPRESSED + "test_microbatches_add_up_before_they_are_compressed",
            COMPRESSED + "test_a_step_sends_few_bytes_and_earlier_microbatches_none",
            WRAPPERS + "test_ranks_of_a_group_train_without_the_others[compressed]",
            WRAPPERS + "test_three_ranks_train_odd_models_with_microbatches_as_one_process[compressed]",
        ),
        difficulty=3,
        minutes=50,
        needs=("open_naive",),
        helps=(
            "COMPRESSORS[compress](shapes, group, **options) -> Compressor\n    A compressor of a flat "
            "tensor that holds tensors of these shapes, one after another.\n    It may have a state, for the "
            "next step.",
            "compressor.mean(flat) -> Tensor\n    Replace the flat tensor by an approximation of its mean, "
            "the same on all;\n    return what this rank has contributed to that mean.",
        ),
        stub='''
            import torch
            from torch import nn

            from comm.collectives import broadcast
            from low_communication.compressors import COMPRESSORS


            class CompressedDataParallel(nn.Module):
                """Does what NaiveDataParallel does, but sends compressed gradients.

                All ranks of `group` begin with the parameters and buffers of its first rank.
                `finish_gradient_sync()`, after the last backward of a step, gives each parameter about the
                mean over the ranks of `group`; a parameter that this rank has not used counts as zero, and
                frozen ones have no gradient. In backwards before the last one of a step
                `require_backward_grad_sync` is False: they send nothing, and their gradients add up.

                What a rank has not sent in a step is not lost:

                    sent + what remains = gradient + what remained before

                `compress` names a compressor, with its `options`. Whether gradients share flat tensors, and
                when they are sent, is up to you.
                """

                require_backward_grad_sync = True

                def __init__(self, module, compress="int8", group=None, **options):
                    raise NotImplementedError

                def forward(self, *inputs, **named_inputs):
                    raise NotImplementedError

                def finish_gradient_sync(self):
                    raise NotImplementedError
        ''',
        hints=(
            "Each rank leaves something else unsent. Which tensor must a rank therefore keep until the next "
            "step, of which size, and which of the two may it subtract: what it has contributed, or the "
            "mean?",
            "mean(flat) overwrites its argument, so copy first what goes in: the gradient, summed over all "
            "microbatches, plus what remained. What remains now is this copy minus what mean() returns.",
            "Make a compressor for each trained parameter, or one for all, in __init__, and keep it: all "
            "ranks must call mean in the same order, also for parameters that a rank has not used. Write "
            "the result into parameter.grad in the parameter's shape.",
        ),
    ),
    Exercise(
        name="hsdp_groups",
        title="Who shards with whom",
        notebook="13_sending_less",
        target="low_communication.train_hsdp.machine_groups",
        tests=(
            NARRATED + "test_hsdp_keeps_parameters_within_a_machine_and_averages_gradients_over_all",
            HSDP + "test_parameters_and_their_gathers_stay_on_a_machine",
        ),
        difficulty=2,
        minutes=25,
        doc="""
            Return two groups of this rank: the ranks of its machine, and those that have the same shard.

            The first group has the axis "shards" and the second "replicas". The first rank of each machine
            has the first shard, and so on. `shard_size` neighbouring ranks stand for a machine. If it is
            None, ranks with the same own_host() are on one machine; if all are on one, each half of an even
            number of ranks stands for a machine. All ranks call it, with the same `shard_size`.

            The lesson's own function also raises WorkbookError if the machines have different numbers of
            ranks. You may leave that out.
        """,
        helps=("cluster.world_size: int, cluster.device: torch.device",),
        hints=(
            "A rank knows its own host and no other. How do all ranks come to the same list of machines, "
            "each a list of ranks? Does own_group need the groups of this rank only, or of all?",
            "all_gather(hosts, own), with an int64 tensor of world_size numbers and one of this rank's "
            "number, tells all ranks all hosts. ranks_by_host(hosts.tolist()) makes lists of ranks. With a "
            "shard_size the lists are range(first, first + shard_size).",
            "If machine 0 is [0, 2] and machine 1 is [1, 3], ranks 0 and 1 have the same shard, and so have "
            "2 and 3: zip(*machines). own_group(all machines, 'shards') returns this rank's own group.",
        ),
    ),
)
