"""With BACKEND=gloo, pipelines on GPUs train with tensors that were received but never copied to the GPU."""

from comm.transport.wire import Transfer

TARGET = "comm.transport.wire.Transfer.wait"
KILLER = "tests.comm.test_point_to_point.test_over_gloo_a_gpus_tensors_go_by_way_of_host_memory"
SYMPTOM = "With BACKEND=gloo, pipelines on GPUs train, and what they learn is noise."


def mutant(self: Transfer) -> None:
    work, self._work = self._work, None
    if work is not None:
        work.wait()
