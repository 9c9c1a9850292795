"""Exercises of lesson 4: stages, and schedules that say who does what, and when."""

from exercises.catalog.exercise import Exercise

SCHEDULES = "tests/pipeline_parallel/test_schedules.py::"
ONE_STAGE = SCHEDULES + "test_schedules_with_one_stage_a_rank_are_valid_and_hold_what_they_say"

NARRATED = "tests/pipeline_parallel/test_narrated.py::"
SPLIT = "tests/pipeline_parallel/test_stage.py::"
ROW = (
    'row.add(kinds, stage)\n    Add an action of each kind, such as "FB", for its next microbatch.',
    "row.actions: list[Action]\n    A table is a list of these lists, one for each rank.",
)
MESSAGES = "tests/pipeline_parallel/test_messages.py::"
DEFERRED = "tests/pipeline_parallel/test_deferred.py::"
BY_HAND = "tests/pipeline_parallel/test_by_hand.py::"

EXERCISES = (
    Exercise(
        name="splitter",
        title="Dividing layers into stages",
        notebook="08_pipelines",
        target="pipeline_parallel.stage.cut",
        tests=(
            SPLIT + "test_no_cut_has_a_cheaper_dearest_stage",
            SPLIT + "test_beside_an_expensive_part_the_others_are_even",
            SPLIT + "test_layers_that_stages_do_not_divide_are_spread_evenly",
            SPLIT + "test_a_sequential_is_cut_by_its_parameters_and_a_gpt_by_its_blocks",
            SPLIT + "test_more_stages_than_parts_are_refused_in_a_sentence",
        ),
        difficulty=3,
        minutes=40,
        doc="""
            Return the parts of each stage as ranges: neighbouring parts, at least one for each stage.

            Of all cuts take one whose most expensive stage is as cheap as can be; among these, one whose sum
            of squared costs is the smallest, so that stages are even; among these, the one whose stages end
            as late as can be, so that a part that costs nothing goes with the part before it. If there are
            fewer parts than stages, raise WorkbookError: {n} parts cannot be cut into {stages} stages: take
            fewer ranks or --chunks, or more --layers.
        """,
        hints=(
            "If the first stage ends at part e, the rest is the same problem with fewer parts and one stage "
            "less. So try every e, and take the best: a recursive function of where a stage starts and how "
            "many stages are left.",
            "A first such function returns the smallest cost that the most expensive stage can have. A "
            "second one tries no stage above it, and returns a tuple: the sum of squared costs, and where "
            "the stages end, with a minus so that later is smaller. min() then takes the best one.",
            "Decorate both with functools.cache, because they are called with the same arguments again and "
            "again. until = [0, *accumulate(costs)] gives the cost of a stage as until[end] - until[start]. "
            "The last stage ends at n; any other must leave a part for each stage after it.",
        ),
    ),
    Exercise(
        name="gpipe_by_hand",
        title="A pipeline from nothing",
        notebook="08_pipelines",
        target="pipeline_parallel.train_afab.AllForwardAllBackward",
        tests=(
            BY_HAND + "test_two_stages_have_the_gradients_of_one_process",
            BY_HAND + "test_four_stages_and_six_microbatches_have_the_gradients_of_one_process",
            BY_HAND + "test_each_activation_and_each_gradient_is_one_message",
        ),
        difficulty=4,
        minutes=75,
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
        name="one_f_one_b_by_hand",
        title="Another order, and less memory",
        notebook="08_pipelines",
        target="pipeline_parallel.train_1f1b_by_hand.OneForwardOneBackward.step",
        tests=(
            NARRATED + "test_one_f_one_b_by_hand_equals_one_process",
            BY_HAND + "test_a_step_by_hand_has_the_order_of_its_table_on_any_number_of_ranks[1f1b]",
            BY_HAND + "test_a_step_by_hand_holds_as_many_microbatches_as_it_must[1f1b]",
        ),
        difficulty=2,
        minutes=25,
        needs=("gpipe_by_hand",),
        doc="""
            Add the gradients of a batch to the parameters' gradients. The last rank returns the loss.

                rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
                rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
                rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

            The picture is 1F1B on three ranks with four microbatches. GPipe's forwards and backwards come in
            another order: a rank begins with some forwards, then does one forward and one backward in turn,
            and ends with the backwards that are left. With p ranks, rank r never holds the activations of
            more than p-r microbatches. There may be fewer microbatches than ranks.
        """,
        helps=(
            "self.begin_step(x, y), self.end_step() -> Tensor | None\n    Call them first and last; "
            "self.end_step() returns the loss.",
            "self.forward_of(i), self.backward_of(i)\n    "
            "Do the forward of microbatch i, or its backward, with their messages.",
            "self.rank: int, self.last: int\n    This rank, and the last one.",
            "self.microbatches: int",
        ),
        hints=(
            "How many forwards can each rank do before the first gradient can have come back to it? Look at "
            "the last rank first, and then at the one before it.",
            "Three loops: forwards alone, a forward and a backward in turn, backwards alone. Rank r begins "
            "with one forward for each rank after it, or with all forwards if there are fewer.",
            "With w forwards in the first loop, the second one does forward_of(i) and backward_of(i - w), "
            "for each i from w on. The last w backwards are left for the third.",
        ),
    ),
    Exercise(
        name="pipeline_gpipe",
        title="The table of GPipe",
        notebook="08_pipelines",
        target="pipeline_parallel.schedules.gpipe",
        tests=(
            SCHEDULES + "test_gpipe_does_all_forwards_and_then_all_backwards_in_the_same_order",
            ONE_STAGE,
        ),
        difficulty=1,
        minutes=15,
        beyond="idle time of gpipe",
        helps=ROW,
        hints=(
            "A table has one row for each stage. `row = _Row()` begins one, row.add('F', stage) adds the "
            "next forward, row.add('B', stage) the next backward, and row.actions is the finished list.",
            "The order on a rank says nothing about when an action starts. All rows of GPipe have the same "
            "actions but for the stage.",
            "Check the arguments first, as `naive` does: _check(stages=stages, microbatches=microbatches).",
        ),
    ),
    Exercise(
        name="pipeline_1f1b",
        title="The table of 1F1B",
        notebook="08_pipelines",
        target="pipeline_parallel.schedules.one_f_one_b",
        tests=(
            SCHEDULES + "test_1f1b_warms_up_less_on_each_further_rank",
            ONE_STAGE,
            "tests/pipeline_parallel/test_narrated.py::test_one_f_one_b_equals_one_process",
            SCHEDULES + "test_what_cannot_be_scheduled_is_said_in_a_sentence",
        ),
        difficulty=2,
        minutes=30,
        beyond="idle time of 1f1b",
        needs=("pipeline_gpipe",),
        doc="""
            Return 1F1B: after some forwards, each rank does one forward and one backward in turn.

                rank 0   F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
                rank 1   .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
                rank 2   .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

            The picture is one_f_one_b(3, 4). A backward such as B0--- takes twice as long as a forward. A
            point is idle time, which is not in the table. With p = `stages`, rank r has stage r.

            Rank 0 above has the warmup F0 F1, the steady state F2 B0 F3 B1, in which a backward follows each
            forward, and the cooldown B2 B3. Rank r holds at most p-r microbatches, however many there are.
            There may also be fewer of them than stages. Raise ValueError if an argument is below 1.
        """,
        helps=ROW,
        hints=(
            "A row has three phases: forwards only; a forward and a backward in turn; backwards only. How "
            "many forwards does the last rank need before its first backward?",
            "Rank r begins with p-1-r forwards, one for each rank after it, and ends with as many backwards. "
            "The next forward already belongs to the steady state: row.add('FB', stage).",
            "There may be fewer microbatches than p-1-r, so the warmup is the smaller of the two numbers. "
            "The steady state has the microbatches that are left.",
        ),
    ),
    Exercise(
        name="pipeline_interleaved",
        title="The table of interleaved 1F1B",
        notebook="08_pipelines",
        target="pipeline_parallel.schedules.interleaved_1f1b",
        tests=(
            SCHEDULES + "test_interleaved_goes_through_its_chunks_round_by_round",
            SCHEDULES + "test_interleaved_puts_what_the_ranks_do_not_divide_into_the_first_rounds",
            SCHEDULES + "test_interleaved_is_valid_and_holds_its_warmup_and_one",
            NARRATED + "test_interleaved_1f1b_equals_one_process",
            SCHEDULES + "test_what_cannot_be_scheduled_is_said_in_a_sentence",
        ),
        difficulty=4,
        minutes=45,
        beyond="idle time of interleaved",
        needs=("pipeline_1f1b",),
        doc="""
            Return interleaved 1F1B: each rank has `chunks` stages, and stage s is on rank s % p.

                rank 0   F0 F1 f0 f1 F2 .  b0--- F3 b1--- f2 B0--- f3 B1--- .  b2--- .  b3--- B2--- B3---
                rank 1   .  F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .  .

            Microbatches go in rounds, whose sizes `_rounds` returns: the microbatches of a round go through
            all stages of a rank, and then those of the next round. Backwards take a round's stages in the
            opposite order. A rank begins with forwards: (chunks-1) times the size of the first round and 2
            (p-1-rank) more, or all there are. From then on a backward follows each forward. Raise ValueError
            if an argument is below 1.
        """,
        helps=ROW,
        hints=(
            "Write down for one rank the chunks of all its forwards, in order: for a round of 2 "
            "microbatches and 2 chunks, 0 0 1 1. Microbatches need no number: row.add takes the next one of "
            "that stage.",
            "The backwards have the same list with the chunks counted from the other end: chunks - 1 - "
            "chunk. Chunk c of rank r is stage c * ranks + r.",
            "Three phases as in 1F1B: forwards[:warmup]; then for each further forward it and the next "
            "backward; then the backwards that are left. warmup is at most len(forwards).",
        ),
    ),
    Exercise(
        name="pipeline_zb_h1",
        title="The table of ZB-H1",
        notebook="08_pipelines",
        target="pipeline_parallel.schedules.zb_h1",
        tests=(
            SCHEDULES + "test_zb_h1_puts_off_the_weight_gradients_by_as_many_backwards_as_the_ranks_number",
            SCHEDULES + "test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank",
            ONE_STAGE,
            SCHEDULES + "test_what_cannot_be_scheduled_is_said_in_a_sentence",
        ),
        difficulty=3,
        minutes=35,
        beyond="idle time of zb_h1",
        needs=("pipeline_1f1b",),
        helps=ROW,
        hints=(
            "Begin with 1F1B, and write I for each backward. What is left is to place one W for each "
            "microbatch.",
            "Rank r puts each W off by r backwards: its first r backwards are I alone, and each later one is "
            "I and then the W that is due.",
            "Number the backwards through the steady state and the cooldown: the actions are 'IW' if the "
            "number is at least r, else 'I'. At the end add the min(m, r) W that are still missing.",
        ),
    ),
    Exercise(
        name="open_1f1b",
        title="A schedule from its properties",
        notebook="08_pipelines",
        target="pipeline_parallel.schedules.one_f_one_b",
        tests=(
            BY_HAND + "test_a_1f1b_table_can_run",
            BY_HAND + "test_1f1b_idles_and_holds_no_more_than_the_formulas_say",
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
        name="derive_the_sends",
        title="Deriving the messages from a table",
        notebook="08_pipelines",
        target="pipeline_parallel.messages.sent_by",
        also=("pipeline_parallel.messages.received_by",),
        tests=(
            MESSAGES + "test_two_ranks_of_gpipe",
            MESSAGES + "test_stages_of_one_rank_send_each_other_nothing",
            MESSAGES + "test_ranks_that_go_on_in_any_order_come_to_the_end",
            NARRATED + "test_zero_bubble_equals_one_process",
        ),
        difficulty=1,
        minutes=15,
        needs=("pipeline_gpipe",),
        doc="""
            Return the message with the action's result, or None if no other stage needs it.

            A message names what it carries: Message(FORWARD, microbatch, stage) is the output of that stage,
            and Message(INPUT_GRADIENT, microbatch, stage) the gradient of its input.
        """,
        docs={
            "received_by": """
                Return the message that the action needs from another stage, or None.
            """,
        },
        hints=(
            "An action is a tuple of kind, microbatch and stage. Who needs the output of a stage, and who "
            "the gradient of its input? Which stages have no neighbour on that side?",
            "A backward comes as one action, BACKWARD, or in halves: INPUT_GRADIENT and WEIGHT_GRADIENT. "
            "Only one of the halves makes something that another stage needs, and only one waits for "
            "another stage.",
            "sent_by: FORWARD sends below the last stage; BACKWARD and INPUT_GRADIENT send above stage 0. "
            "received_by names the message of the neighbour: stage - 1 for a forward above stage 0, stage + "
            "1 for a gradient below the last stage.",
        ),
    ),
    Exercise(
        name="post_receives_early",
        title="Receives in time, and no deadlock",
        notebook="08_pipelines",
        target="pipeline_parallel.messages.receives_before",
        tests=(
            MESSAGES + "test_two_ranks_of_gpipe",
            MESSAGES + "test_without_looking_ahead_a_receive_is_posted_just_before_it_is_needed",
            MESSAGES + "test_receives_stand_in_the_senders_order_even_where_another_one_is_needed_first",
            MESSAGES + "test_receives_from_a_rank_are_posted_in_its_order_and_exactly_as_early_as_asked",
            MESSAGES + "test_ranks_that_go_on_in_any_order_come_to_the_end",
        ),
        difficulty=4,
        minutes=45,
        needs=("derive_the_sends",),
        doc="""
            Return, for each action of the rank's row, the messages whose receives are posted before it.

            A receive is posted before the action that is `ahead` actions before the one that needs the
            message, or earlier, so that the receives from a rank are posted in the order of its sends: its
            k-th send meets the k-th receive, and with another order both ranks would wait. Stages of one rank
            send each other nothing.
        """,
        helps=("message.receiver: int\n    The stage that receives it.",),
        hints=(
            "First go through the table once, and note for each other rank the messages that it sends to "
            "this one, in the order of its row: sent_by(action, last stage) is what an action sends.",
            "Then go through this rank's row. Before an action stand the receives of what it and the next "
            "`ahead` actions need: received_by(action, last stage).",
            "To post a receive, post first all earlier ones from the same rank: take messages from the left "
            "of that rank's queue until the wanted one is out. If it is no longer there, it was posted "
            "before.",
        ),
    ),
    Exercise(
        name="deferred_weight_gradients",
        title="A backward in two halves",
        notebook="08_pipelines",
        target="pipeline_parallel.deferred.SplitLinear.forward",
        also=("pipeline_parallel.deferred.SplitLinear.backward",),
        tests=(
            DEFERRED + "test_a_linear_layers_gradients_are_autograds_for_any_number_of_dimensions",
            DEFERRED + "test_only_weights_wait_and_norms_and_embeddings_have_their_gradients_at_once",
            DEFERRED + "test_what_is_frozen_keeps_nothing_for_later",
            NARRATED + "test_zero_bubble_equals_one_process",
        ),
        difficulty=3,
        minutes=35,
        needs=("pipeline_zb_h1",),
        doc="""
            Return F.linear(x, weight, bias), and keep in `ctx` what the backward needs.

            Do not pass the weight to save_for_backward: with recomputation a copy would come back, but the
            parameter itself must get the gradient.
        """,
        docs={
            "backward": """
                Return the gradients for `later`, x, weight and bias; all but that of x are None.

                The gradients of weight and bias are not computed here, but by a function that runs later. The
                gradient of x is None if x needs none, and nothing is left for later if neither weight nor
                bias needs one.
            """,
        },
        helps=(
            "ctx.later: list[Callable[[], None]]\n    The functions that run later.",
            "ctx.needs_input_grad: tuple[bool, ...]\n    Of forward's arguments after ctx.",
        ),
        hints=(
            "y = x W^T + b, and dy is the gradient of y. The gradient of x is dy W. It is all that the "
            "stage before waits for.",
            "The gradient of W is dy^T x, where x and dy have one row for each token: flatten(0, -2) makes "
            "rows of any number of dims. The gradient of b is the sum of dy's rows.",
            "Define a function in the backward that computes both and gives them to add_to, each only if "
            "that parameter requires a gradient. Return None, dx, None, None: forward has later, x, weight "
            "and bias.",
        ),
    ),
)
