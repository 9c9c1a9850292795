"""Train a GPT in one process, with no technique around it: the table compares all techniques with this.

python benchmarks/vanilla.py --size 8layers
"""

from comm.script import start
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import loss_of
from training.arguments import TrainArgs
from training.run import Run


def main(cluster: Cluster, args: TrainArgs) -> None:
    if cluster.world_size > 1:
        raise WorkbookError("The vanilla training is that of one process; start it without torchrun.")
    run = Run(cluster, args, "vanilla")
    model = run.model()
    optimizer = run.optimizer(model)
    for x, y in run.batches(model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        run.record(loss)
    run.finish(model)


if __name__ == "__main__":
    start(main, TrainArgs)
