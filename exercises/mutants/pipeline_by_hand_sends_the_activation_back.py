"""All stages but the last learn nonsense: an activation is sent back instead of its gradient."""

from types import SimpleNamespace
from typing import Any

from comm import point_to_point
from pipeline_parallel.train_model_parallel import ModelParallel

TARGET = "pipeline_parallel.train_model_parallel.ModelParallel"
KILLER = "tests.pipeline_parallel.test_narrated.test_model_parallel_equals_one_process"
CAUSE = "and not the activation"


class mutant(ModelParallel):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        received = []

        def recv(tensor, src: int) -> None:
            point_to_point.recv(tensor, src)
            received.append(tensor)

        def send(tensor, dst: int) -> None:
            point_to_point.send(
                tensor if dst > self.rank else received[-1 if self.output_like is None else -2], dst
            )

        self.messages = SimpleNamespace(send=send, recv=recv)
