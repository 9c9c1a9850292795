"""With split backwards biases do not learn: only the gradients of the weights are computed."""

from pipeline_parallel.deferred import _add_to

TARGET = "pipeline_parallel.deferred._Linear.backward"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers.test_a_split_backward_computes_every_weights_gradient_once"
)
CAUSE = "is it not computed"


def mutant(ctx, dy):
    (x,), weight = ctx.saved_tensors, ctx.weight
    ctx.deferred.add(lambda: _add_to(weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)), x, dy)
    return None, dy @ weight if ctx.needs_input_grad[1] else None, None, None
