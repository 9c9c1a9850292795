import torch
import torch.nn.functional as F
from torch import nn

from data_parallel import train_naive
from data_parallel.train_naive import NaiveDataParallel, traffic_per_step
from lab.check import assert_same, gradients, parameters, reference_gradients, replicas_equal
from lab.cluster import Cluster
from lab.ledger import LEDGER
from lab.model import GPT, GPTConfig, loss_of
from lab.ranks import run_ranks
from lab.text import rank_slice

BATCH = 12  # divisible by 1, 2, 3 and 4
PATTERNS = ("ring", "tree", "torch")


class Odd(nn.Module):
    """Shapes that divide by nothing, a frozen layer, a buffer, and a branch only some examples take."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.frozen, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.branch, self.never = nn.Linear(5, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((1,), 1.0 + seed))
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.frozen(self.first(x * self.scale)))
        y, takes_branch = self.last(h), x[:, :1] > 0
        return y + self.branch(h) * takes_branch if takes_branch.any() else y


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 7, generator=random).double(), torch.randint(3, (BATCH,), generator=random)
    x[:, 0] = -1.0
    x[-1, 0] = 1.0  # only the last rank's slice takes the branch
    return x, y


def odd_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def gpt(seed: int, tied: bool) -> GPT:
    return GPT(GPTConfig.named("tiny", tied=tied), seed=seed).double()


def text() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (BATCH, 33), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def mine(cluster: Cluster, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [rank_slice(part, cluster.rank, cluster.world_size) for part in batch]


def compare_with_one_process(
    cluster: Cluster, make, loss, batch, microbatches: int = 1, steps: int = 3
) -> None:
    """Gradients of every parameter at each step, and parameters after SGD steps, for every pattern."""
    for pattern in PATTERNS:
        reference = make(0)
        model = NaiveDataParallel(make(cluster.rank), pattern=pattern)
        assert_same(parameters(model.module), parameters(reference), rtol=0, what="initial parameter")
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        for _ in range(steps):
            expected = reference_gradients(reference, lambda m: loss(m, *batch))
            optimizers[1].zero_grad()
            parts = [part.chunk(microbatches) for part in mine(cluster, batch)]
            for x, y in zip(*parts, strict=True):
                (loss(model, x, y) / microbatches).backward()
            model.finish_gradient_sync()
            assert_same(gradients(model.module), expected)
            for optimizer in optimizers:
                optimizer.step()
        assert_same(parameters(model.module), parameters(reference), what="parameter")
        assert replicas_equal(cluster, model)


def compare_all(cluster: Cluster) -> None:
    for tied in (True, False):
        compare_with_one_process(
            cluster, lambda seed, tied=tied: gpt(seed, tied), lambda m, x, y: loss_of(m(x), y), text()
        )
    compare_with_one_process(cluster, Odd, odd_loss, examples())


def test_gradients_and_parameters_equal_one_process_on_1_rank():
    run_ranks(compare_all, 1)


def test_gradients_and_parameters_equal_one_process_on_2_ranks():
    run_ranks(compare_all, 2)


def test_gradients_and_parameters_equal_one_process_on_3_ranks():
    run_ranks(compare_all, 3)


def test_gradients_and_parameters_equal_one_process_on_4_ranks():
    run_ranks(compare_all, 4)


def test_gradients_of_microbatches_add_up_to_those_of_the_whole_batch():
    def work(cluster: Cluster) -> None:
        compare_with_one_process(
            cluster, lambda seed: gpt(seed, True), lambda m, x, y: loss_of(m(x), y), text(), 3
        )

    run_ranks(work, 2)


def test_ranks_start_from_rank_0s_parameters_and_buffers():
    def work(cluster: Cluster) -> None:
        model, reference = NaiveDataParallel(Odd(cluster.rank)), Odd(0)
        assert_same(parameters(model.module), parameters(reference), rtol=0, what="parameter")
        assert torch.equal(model.module.scale, reference.scale)

    run_ranks(work, 3)


def test_a_gradient_is_the_mean_over_ranks_and_not_their_sum():
    def work(cluster: Cluster) -> None:
        model = NaiveDataParallel(nn.Linear(3, 2, bias=False))
        model(torch.ones(1, 3) * (cluster.rank + 1)).sum().backward()
        model.finish_gradient_sync()
        assert_same(gradients(model.module), {"weight": torch.full((2, 3), 2.0)})  # the mean of 1, 2 and 3

    run_ranks(work, 3)


def test_a_parameter_no_rank_used_keeps_no_gradient_and_one_that_some_used_has_it_everywhere():
    def work(cluster: Cluster) -> None:
        model = NaiveDataParallel(Odd(cluster.rank))
        odd_loss(model, *mine(cluster, examples())).backward()
        only_here = model.module.branch.weight.grad is not None
        model.finish_gradient_sync()
        assert only_here == (cluster.rank == cluster.world_size - 1)
        assert model.module.branch.weight.grad is not None
        assert model.module.never.weight.grad is None
        assert model.module.frozen.weight.grad is None

    run_ranks(work, 4)


def test_replicas_in_float32_stay_bitwise_equal_over_20_steps():
    def work(cluster: Cluster) -> None:
        model = NaiveDataParallel(GPT(GPTConfig.named("tiny"), seed=cluster.rank))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = mine(cluster, text())
        for _ in range(20):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            model.finish_gradient_sync()
            optimizer.step()
        assert replicas_equal(cluster, model)

    run_ranks(work, 3)


def test_a_step_sends_exactly_what_the_formula_says():
    def work(cluster: Cluster) -> None:
        for pattern in ("ring", "tree", "recursive_doubling", "halving_doubling", "flat"):
            model = NaiveDataParallel(GPT(GPTConfig.named("tiny"), seed=cluster.rank), pattern=pattern)
            loss = loss_of(model(mine(cluster, text())[0]), mine(cluster, text())[1])
            loss.backward()
            before = LEDGER.total()
            model.finish_gradient_sync()
            assert LEDGER.total() - before == traffic_per_step(cluster, model, pattern)

    for world_size in (1, 2, 3, 4):
        run_ranks(work, world_size)


def test_the_loss_of_the_lesson_does_not_depend_on_the_number_of_ranks(capfd):
    def work(cluster: Cluster) -> None:
        train_naive.main(cluster, train_naive.Args(steps=5, size="tiny", json=True))

    for world_size in (1, 2, 3):
        run_ranks(work, world_size)
    lines = [line for line in capfd.readouterr().out.splitlines() if "last_loss" in line]
    losses = [float(line.split('"last_loss": ')[1].split(",")[0]) for line in lines]
    assert len(losses) == 3
    assert max(losses) - min(losses) < 1e-4 * losses[0]
