"""With zero bubble schedules weight gradients are twice too large: the input backward computes them too."""

from pipeline_parallel.deferred import _add_to

TARGET = "pipeline_parallel.deferred._Linear.backward"
KILLER = (
    "tests.pipeline_parallel.test_mutant_killers.test_a_split_backward_computes_every_weights_gradient_once"
)
CAUSE = "added up twice"


def mutant(ctx, dy):
    (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
    rows_of_dy, rows_of_x = dy.flatten(0, -2), x.flatten(0, -2)

    def weights() -> None:
        _add_to(weight, rows_of_dy.t() @ rows_of_x)
        if bias is not None:
            _add_to(bias, rows_of_dy.sum(0))

    ctx.deferred.add(weights, x, dy)
    return None, dy @ weight, rows_of_dy.t() @ rows_of_x, None if bias is None else rows_of_dy.sum(0)
