"""Test that a tensor parallel model trains as the plain model does on one process."""

import pytest
import torch
from torch import Tensor, nn

from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP
from lab.ranks import run_ranks
from lab.trace.memory import live_bytes
from tensor_parallel.parallel_model import TensorParallel
from tensor_parallel.parallelize import parallelize
from tests.tensor_parallel.equivalence import (
    BOTH_MODES,
    compare_mlp_with_one_process,
    compare_with_one_process,
    gpt,
    text,
)
from training.replicas import replicas_equal


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@BOTH_MODES
def test_every_gradient_and_parameter_equals_one_process(n: int, sequence_parallel: bool):
    def compare(cluster: Cluster) -> None:
        compare_with_one_process(cluster, sequence_parallel)
        compare_with_one_process(cluster, sequence_parallel, tied=False, clip=0.1, steps=2)

    run_ranks(compare, n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@BOTH_MODES
def test_without_overlap_every_gradient_equals_one_process(n: int, sequence_parallel: bool):
    def compare(cluster: Cluster) -> None:
        compare_with_one_process(cluster, sequence_parallel, steps=2, overlap=False)

    run_ranks(compare, n)


def test_two_ranks_have_the_gradients_of_one_process():
    run_ranks(lambda cluster: compare_with_one_process(cluster, steps=2, num_layers=1), 2)


def test_two_ranks_with_sequence_parallel_have_the_gradients_of_one_process():
    run_ranks(lambda cluster: compare_with_one_process(cluster, True, steps=2, num_layers=1), 2)


def test_replicated_parameters_count_once_in_the_norm():
    run_ranks(lambda cluster: compare_with_one_process(cluster, clip=1e-3, steps=1, num_layers=1), 2)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_query_heads_stay_on_the_rank_of_the_keys_and_values_they_share(n: int):
    def compare(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            heads = {"num_kv_heads": 6 if n < 4 else 4}
            compare_with_one_process(cluster, sequence_parallel, steps=2, **heads)
            compare_with_one_process(cluster, sequence_parallel, steps=2, tied=False, num_layers=1, **heads)

    run_ranks(compare, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_with_equal_dropout_masks_gradients_equal_one_process(n: int):
    def compare(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            compare_with_one_process(cluster, sequence_parallel, dropout=0.3, num_layers=1)
            heads = {"num_kv_heads": 6 if n < 4 else 4}
            compare_with_one_process(cluster, sequence_parallel, dropout=0.3, time=11, steps=2, **heads)

    run_ranks(compare, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_text_may_have_any_number_of_tokens_up_to_the_block_size(n: int):
    def compare(cluster: Cluster) -> None:
        for time in (1, 2, 11, 16):
            compare_with_one_process(cluster, True, time=time, steps=1, num_layers=1)
        compare_with_one_process(cluster, True, time=15, steps=2, block_size=15, num_layers=1)
        compare_with_one_process(cluster, False, time=1, steps=1, num_layers=1)

    run_ranks(compare, n)


def test_more_tokens_than_the_block_size_are_refused():
    def refuse(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            model = parallelize(gpt(num_layers=1), None, sequence_parallel)
            with pytest.raises(ValueError, match="17 tokens in a row exceed block_size 16"):
                model(text(17)[0])

    run_ranks(refuse, 3)


def test_frozen_parameters_have_no_gradient_and_the_others_have_one():
    def compare(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            for frozen in (
                [
                    "position_embedding",
                    "blocks.0.attention.q_proj",
                    "blocks.1.mlp.up_proj.bias",
                    "final_norm.weight",
                ],
                [
                    "token_embedding",
                    "position_embedding",
                    "blocks.0.attention_norm",
                    "blocks.1.mlp.down_proj",
                ],
                ["head", "blocks.0", "blocks.1.attention.o_proj.bias"],
            ):
                compare_with_one_process(
                    cluster, sequence_parallel, steps=2, clip=0.1, tied=False, frozen=frozen
                )

    run_ranks(compare, 2)


def test_clipping_uses_the_norm_of_the_full_model():
    def compare(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            for clip in (1e-3, 0.1, 1e3):  # the last one changes nothing
                compare_with_one_process(cluster, sequence_parallel, clip=clip, steps=2, num_layers=1)

    run_ranks(compare, 3)


def test_torchs_own_clipping_uses_the_norm_of_the_full_model():
    def compare(cluster: Cluster) -> None:
        for foreach, sequence_parallel in ((None, True), (None, False), (True, True)):

            def clip(model: TensorParallel, max_norm: float, foreach: bool | None = foreach) -> Tensor:
                return nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=foreach)

            compare_with_one_process(
                cluster, sequence_parallel, clip=0.1, steps=2, clip_grad_norm_=clip, num_layers=1
            )

    run_ranks(compare, 2)


def test_a_grad_scaler_skips_a_step_on_all_ranks_when_one_ranks_shard_has_an_infinity():
    def work(cluster: Cluster) -> list[tuple[float, bool]]:
        model, x, seen = parallelize(MLP([2, 4, 1])), torch.ones(3, 2), []
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", 4.0)
        for is_infinite in (True, False):
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.scale(model(x).sum()).backward()
            if is_infinite and cluster.rank == 1:
                next(model.parameters()).grad[0, 0] = torch.inf
            model.finish_gradient_sync()
            scaler.step(optimizer)
            scaler.update()
            stepped = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
            seen.append((scaler.get_scale(), any(stepped)))
        return seen

    assert run_ranks(work, 2) == [[(2.0, False), (2.0, True)]] * 2


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_an_mlp_may_have_an_odd_or_an_even_number_of_layers(n: int):
    def compare(cluster: Cluster) -> None:
        compare_mlp_with_one_process(cluster, [7, 12, 5])
        compare_mlp_with_one_process(cluster, [7, 12, 5, 24, 3], clip=0.1)
        compare_mlp_with_one_process(cluster, [7, 12, 5, 12])
        compare_mlp_with_one_process(cluster, [7, 12], clip=0.1)

    run_ranks(compare, n)


def test_replicated_parameters_stay_equal_bit_by_bit():
    def train(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            model = parallelize(gpt(cluster.rank, dropout=0.1, num_layers=1).float(), None, sequence_parallel)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            x, y = text(11)
            for _ in range(4):
                optimizer.zero_grad()
                model.loss(model(x), y).backward()
                model.finish_gradient_sync()
                model.clip_grad_norm_(1.0)
                optimizer.step()
            replicated = nn.ParameterList(
                p for name, p in model.module.named_parameters() if name not in model.dims
            )
            assert len(replicated) == 9 and replicas_equal(cluster, replicated)

    run_ranks(train, 3)


def test_a_rank_holds_one_nth_of_the_sharded_parameters_and_frees_the_plain_model():
    def measure(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            for tied in (False, True):
                sizes = {name: parameter.nbytes for name, parameter in gpt(tied=tied).named_parameters()}
                before = live_bytes({})["other"]
                model = parallelize(gpt(tied=tied), None, sequence_parallel)
                held = live_bytes({"parameters": model.parameters()})
                padding = (2 - tied) * 3 * 24 * 8  # 61 entries are padded to 64 on 4 ranks
                cut = sum(size for name, size in sizes.items() if name in model.dims) + padding
                replicated = sum(size for name, size in sizes.items() if name not in model.dims)
                assert held == {"parameters": cut // 4 + replicated, "other": before}
                del model

    run_ranks(measure, 4)


def test_gradients_of_several_backwards_add_up():
    def accumulate(cluster: Cluster) -> None:
        for sequence_parallel in (False, True):
            model = parallelize(gpt(num_layers=1), None, sequence_parallel)
            x, y = text()
            (model.loss(model(x), y)).backward()
            model.finish_gradient_sync()
            once = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            for part in (slice(0, 2), slice(2, 4)):
                (model.loss(model(x[part]), y[part]) / 2).backward()
            model.finish_gradient_sync()
            torch.testing.assert_close([p.grad for p in model.parameters()], once, rtol=1e-9, atol=1e-12)

    run_ranks(accumulate, 2)


def test_sizes_that_do_not_divide_are_refused_on_every_rank_in_the_same_sentence():
    cases = {
        "5 query heads": lambda: parallelize(gpt(num_heads=5, width=20)),
        "1 key and value heads": lambda: parallelize(gpt(num_kv_heads=1)),
        "7 outputs": lambda: parallelize(MLP([4, 7, 4])),
        "9 outputs": lambda: parallelize(MLP([4, 8, 4, 9])),
        "not a Linear": lambda: parallelize(nn.Linear(4, 4)),
        "An MLP has no tokens": lambda: parallelize(MLP([4, 8, 4]), sequence_parallel=True),
    }

    def refuse(cluster: Cluster) -> list[str]:
        sentences = []
        for make in cases.values():
            with pytest.raises(WorkbookError) as error:
                make()
            sentences.append(str(error.value))
        return sentences

    first, second = run_ranks(refuse, 2)
    assert first == second
    for what, sentence in zip(cases, first, strict=True):
        assert what in sentence and sentence.endswith(".") and sentence.count(". ") == 0, sentence
