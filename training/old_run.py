"""Give scripts that are not converted yet the calls of their loops."""

from contextlib import ExitStack, contextmanager

from comm.collectives import all_reduce
from comm.cost import expected_traffic
from comm.exchange import on_main  # noqa: F401
from lab.launch.errors import WorkbookError
from lab.trace import timeline
from lab.trace.ledger import Traffic
from training.data import seed_step
from training.finite import CURE, refuse_not_finite
from training.run import RECORDED_STEPS
from training.run import Run as NewRun
from training.valid_targets import valid_targets


class Run(NewRun):
    @contextmanager
    def checkpointing(self, model, optimizer):
        if not self._args.allow_nonfinite:
            optimizer.register_step_pre_hook(
                lambda *_: refuse_not_finite(model, optimizer, self.current_step, self._cluster.rank)
            )
        with ExitStack() as during:
            during.enter_context(self._resuming.begin(model, optimizer))
            yield self._resuming.first_step
            self._until_reported = during.pop_all()

    def save_if_due(self, step):
        pass

    @contextmanager
    def step(self):
        if self._meter is None:
            self._begin()
        if self._steps_done == RECORDED_STEPS:
            timeline.stop_recording()
        seed_step(self._args.seed, self.current_step - 1, self._stream)
        with self._meter.step() as record:
            yield record
            if self._tick is not None:
                record.loss = None
        timeline.settle()

    def valid_targets(self, targets):
        if not self._args.ignore_first:
            return targets.numel()
        self._expected += expected_traffic("all_reduce", self.pattern, 1, 8)
        return valid_targets(targets, pattern=self.pattern)

    def mean_loss(self, loss):
        mean = loss.detach().float().clone()
        all_reduce(mean, op="mean", pattern=self.pattern)
        if not self._args.allow_nonfinite and not mean.isfinite():
            raise WorkbookError(f"The loss is {mean.item()}. {CURE}")
        return mean

    def expect_traffic(self, of_the_step, with_loss=True):
        of_loss = expected_traffic("all_reduce", self.pattern, 1, 4)
        self._expected += of_the_step + of_loss if with_loss else of_the_step

    def evaluate(self, step, model):
        self._evaluate(step + 1, model)

    def stop_if_asked(self, step):
        self._resuming.save_if_due(step + 1)

    def predicted_seconds(self, by_step):
        return None

    def _report(self, model, traffic, extras):
        assert self._meter is not None
        for name, value in list(extras.items()):
            if callable(value):
                del extras[name]
        return super()._report(model, traffic, extras)


__all__ = ["Run", "Traffic"]
