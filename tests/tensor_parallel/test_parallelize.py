"""Test what a tensor parallel model holds, saves and refuses, and what PyTorch's DTensors send.

tests/test_wrappers.py compares both, as all wrappers, with one process.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from lab.check import assert_same, gradients, parameters
from lab.cluster import Cluster
from lab.launch.errors import WorkbookError
from lab.models.model import MLP, loss_of
from lab.ranks import RankError, run_ranks
from lab.trace.ledger import LEDGER
from lab.trace.memory import live_bytes
from tensor_parallel.parallelize import parallelize
from tensor_parallel.train_dtensor import DTensorGPT, by_comm
from tests import dtensors
from tests.equivalence import compare_with_one_process
from tests.on_ranks import on_ranks
from tests.refusals import refusal, the_one_sentence
from tests.tasks import Task
from tests.tensor_parallel.equivalence import full_tensors, gathered, gpt, text
from tests.wrappers import named
from training.report import replica_digests


@on_ranks(3)
def test_an_mlp_may_have_an_odd_or_an_even_number_of_layers(cluster: Cluster):
    for sizes in ([7, 12, 5, 24, 3], [7, 12, 5, 12], [7, 12]):
        task = Task(lambda seed, sizes=sizes: MLP(sizes, seed).double())
        compare_with_one_process(cluster, named("tensor"), task, (1, 3), clip=0.1)


@on_ranks(2)
def test_gradients_count_once_however_backwards_and_synchronisation_alternate(cluster: Cluster):
    x, _ = text()
    for program in ("backward backward finish", "backward finish backward finish finish"):
        plain, ours = gpt(num_layers=1), parallelize(gpt(num_layers=1), None, True)
        for number, what in enumerate(program.split()):
            tokens = (x + number) % 61
            if what == "finish":
                ours.finish_gradient_sync()
            else:
                loss_of(plain(tokens), tokens).backward()
                ours.loss(ours(tokens), tokens).backward()
        found = full_tensors(ours, gradients(ours.module))
        assert_same(found, gradients(plain), what=f"gradient, {program},")


@on_ranks(3)
def test_an_optimizer_made_before_parallelize_trains_the_shards_and_replicas_stay_equal_bit_by_bit(
    cluster: Cluster,
):
    x, y = text(11)
    for sequence_parallel in (False, True):
        plain = gpt(cluster.rank, dropout=0.1, num_layers=1).float()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        loss_of(plain(x), y).backward()  # of the plain model: not a shard's gradient
        model = parallelize(plain, None, sequence_parallel)
        assert all(gradient is None for gradient in gradients(model).values())
        before = parameters(model)
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(model(x), y).backward()
            model.finish_gradient_sync()
            model.clip_grad_norm_(1.0)
            optimizer.step()
        assert not any(torch.equal(before[name], p) for name, p in model.named_parameters())
        named = model.module.named_parameters()
        replicated = nn.ParameterList(p for name, p in named if name not in model.dims)
        assert len(replicated) == 9 and len(set(replica_digests(cluster, replicated))) == 1


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_a_rank_holds_one_nth_of_the_sharded_parameters_and_frees_the_plain_model(
    cluster: Cluster, tied: bool
):
    sizes = {name: parameter.nbytes for name, parameter in gpt(tied=tied).named_parameters()}
    before = live_bytes({})["other"]
    model = parallelize(gpt(tied=tied), None, sequence_parallel=tied)
    held = live_bytes({"parameters": model.parameters()})
    padding = (2 - tied) * 3 * 24 * 8  # 61 entries are padded to 64 on 4 ranks
    cut = sum(size for name, size in sizes.items() if name in model.dims) + padding
    replicated = sum(size for name, size in sizes.items() if name not in model.dims)
    assert held == {"parameters": cut // 4 + replicated, "other": before}


@pytest.mark.parametrize("tied", [False, True])
def test_a_state_saved_by_two_ranks_is_loaded_by_one_process_and_by_three_ranks(tied: bool):
    def logits_of(model: nn.Module) -> Tensor:
        return gathered(model(text()[0]), -1)[..., :61]

    def save(cluster: Cluster) -> tuple[dict[str, Tensor], Tensor]:
        model = parallelize(gpt(4, tied=tied), None, sequence_parallel=tied)
        state, logits = model.full_state_dict(), logits_of(model)
        model.module.token_embedding.weight.data.zero_()  # the state is a copy
        return state, logits

    def load(cluster: Cluster, state: dict[str, Tensor], logits: Tensor) -> None:
        model = parallelize(gpt(5, tied=tied), None, sequence_parallel=not tied)
        model.load_full_state_dict(state)
        assert_same({"logits": logits_of(model)}, {"logits": logits}, what="output")
        assert_same(model.full_state_dict(), state, 0, "saved again, it")

    saved = run_ranks(save, 2)
    plain = gpt(4, tied=tied)
    for state, logits in saved:
        assert_same(state, plain.state_dict(), 0, "entry")
        assert_same({"logits": plain(text()[0]).detach()}, {"logits": logits}, what="output")
    run_ranks(load, 3, *saved[0])


def test_what_cannot_be_divided_is_refused_on_every_rank_in_the_same_sentence():
    def frozen_later() -> None:
        model = parallelize(gpt(num_layers=1), None, True)
        model.module.final_norm.requires_grad_(False)
        model(text()[0])

    cases = {
        "5 query heads": lambda: parallelize(gpt(num_heads=5, width=20)),
        "1 key and value heads": lambda: parallelize(gpt(num_kv_heads=1)),
        "7 inputs": lambda: parallelize(MLP([4, 7, 4])),
        "9 outputs": lambda: parallelize(MLP([4, 8, 4, 9])),
        "takes a GPT": lambda: parallelize(nn.Linear(4, 4)),
        "without sequence parallelism": lambda: parallelize(MLP([4, 8, 4]), sequence_parallel=True),
        "frozen": frozen_later,
    }

    def refuse(cluster: Cluster) -> list[str]:
        sentences = [refusal(make) for make in cases.values()]
        for sequence_parallel in (False, True):
            model = parallelize(gpt(num_layers=1), None, sequence_parallel)
            with pytest.raises(ValueError, match="17 tokens in a row exceed block_size 16"):
                model(text(17)[0])
        return sentences

    first, second = run_ranks(refuse, 2)
    assert first == second
    for what, sentence in zip(cases, first, strict=True):
        assert what in sentence and sentence.endswith(".") and sentence.count(". ") == 0, sentence


@on_ranks(2)
def test_another_loss_than_the_models_is_refused_for_shards_of_the_vocabulary(cluster: Cluster):
    x, y = text()
    model = parallelize(gpt(0))
    for loss in (lambda logits, y: logits.log_softmax(-1).sum(), loss_of):
        with pytest.raises(WorkbookError, match=r"with its loss\(\)"):
            loss(model(x), y)
    model.loss(model(x), y).backward()


def test_ranks_that_are_fed_different_batches_are_refused_on_all_ranks():
    def work(cluster: Cluster) -> str:
        return refusal(parallelize(gpt(0)), text()[0] + cluster.rank)

    assert "different inputs" in the_one_sentence(run_ranks(work, 2))


def test_ranks_with_the_same_inputs_and_different_targets_are_told_so():
    def work(cluster: Cluster) -> str:
        model, (x, y) = parallelize(gpt(0)), text()
        return refusal(model.loss, model(x), y + cluster.rank)

    assert "different targets" in the_one_sentence(run_ranks(work, 2))


@on_ranks(2)
def test_the_gradient_of_a_divided_weight_has_no_norm_of_its_own(cluster: Cluster):
    x, y = text()
    model = parallelize(gpt(0))
    model.loss(model(x), y).backward()
    with pytest.raises(WorkbookError, match="clip_grad_norm_"):
        model.module.head.weight.grad.norm()
    with pytest.raises(WorkbookError, match="element by element"):
        torch.optim.Adafactor(model.parameters()).step()


@on_ranks(2)
def test_inference_mode_computes_what_no_grad_does(cluster: Cluster):
    x, _ = text()
    model = parallelize(gpt(0), sequence_parallel=True)
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


def one_backward(model: DTensorGPT, x: Tensor, y: Tensor) -> Any:
    with loss_parallel():
        loss: Any = loss_of(model(x), y)  # a DTensor
        loss.backward()
    return loss.detach().full_tensor()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_through_comm_it_computes_the_same_bits_and_sends_what_the_formula_says(
    cluster: Cluster, sequence_parallel: bool
):
    x, y = text(16)
    native = DTensorGPT(gpt(0), cluster.device, sequence_parallel).float()
    before = LEDGER.total()
    one_backward(native, x, y)
    native.finish_gradient_sync()
    assert LEDGER.total() == before  # outside of by_comm() nothing is counted
    untouched = gradients(native.module)
    native.zero_grad()
    with by_comm():
        one_backward(native, x, y)
        native.finish_gradient_sync()
    assert LEDGER.total() - before == native.traffic(x.shape)
    found = dtensors.full_tensors(gradients(native.module))
    assert_same(found, dtensors.full_tensors(untouched), 0)


def test_sizes_that_do_not_divide_are_refused_in_one_sentence():
    def heads(cluster: Cluster) -> None:
        DTensorGPT(gpt(0, num_heads=12, num_kv_heads=3), cluster.device)

    def tokens(cluster: Cluster) -> None:
        DTensorGPT(gpt(0), cluster.device, sequence_parallel=True)(text(13)[0])

    with pytest.raises(RankError, match="3 key and value heads cannot be divided among 2 ranks equally"):
        run_ranks(heads, 2)
    with pytest.raises(RankError, match="13 tokens cannot be divided among 2 ranks equally"):
        run_ranks(tokens, 2)
