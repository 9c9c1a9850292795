"""Exercises of lesson 4, second part: from a table to messages, and gradients in halves."""

from exercises.catalog.exercise import Exercise

NARRATED = "tests/pipeline_parallel/test_narrated.py::"
MESSAGES = "tests/pipeline_parallel/test_messages.py::"
DEFERRED = "tests/pipeline_parallel/test_deferred.py::"

EXERCISES = (
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
            k-th send meets the k-th receive, and with another order both ranks would wait. Stages of one
            rank send each other nothing. `placement(table)` has the rank of each stage.
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

                If the weight or the bias needs a gradient, do not compute it, but append a function without
                arguments to the list `ctx.later`. The function runs later, and adds to the gradients of
                weight and bias. `add_to(parameter, gradient)` adds to a gradient or begins it. The gradient
                of x is None if x needs none: ctx.needs_input_grad tells, in the order of forward's arguments
                after `ctx`.
            """,
        },
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
