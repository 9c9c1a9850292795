"""Say what has probably caused a failure in a way that only makes sense in one lesson, such as pipelines."""

import re
from collections.abc import Callable

from torch import Tensor

from exercises.evidence import Evidence
from exercises.relations import relation

# The tied embedding, and what the ranks of a tensor group do not divide.
_TIED = re.compile(r"(token_embedding|head)\.weight")
_UNDIVIDED = re.compile(r"norm|position|bias")
_EXPERT = re.compile(r"blocks\.\d+\.mlp\.experts\.\d+\..*")


def mixed_up_microbatches(e: Evidence) -> str | None:
    """Find out from the rows of a batch which microbatches are wrong."""
    if e.lesson != "pipeline_parallel" or e.microbatches < 2:
        return None
    if "order" in e.kinds:
        return (
            "The numbers are right and in the wrong order, as if microbatches were mixed up: does each "
            "backward use what its own microbatch's forward has kept, and is each result written to the rows "
            "of its microbatch?"
        )
    for one in e.compared.values():
        for name in e.wrong_on(one):
            got, expected = one.pairs[name]
            if not isinstance(got, Tensor) or not isinstance(expected, Tensor) or name != "input":
                continue
            parts = zip(got.chunk(e.microbatches), expected.chunk(e.microbatches), strict=True)
            first, *later = [relation(*part) is None for part in parts]
            if first and not any(later):
                return (
                    "The first microbatch is right and all later ones are wrong: is something of earlier "
                    "microbatches still there, such as a gradient to which the next one is added?"
                )
    return None


def wrong_activations(e: Evidence) -> str | None:
    """Find out whether a pipeline's forward is wrong already."""
    if e.lesson != "pipeline_parallel" or "loss" not in e.wrong or len(e.wrong) == 1:
        return None
    return (
        "The loss is wrong too, so a stage has computed with a wrong activation: does each receive get the "
        "message that is meant for it? Between two ranks messages arrive in the order in which they were "
        "sent, and receives must be posted in that order."
    )


def sent_back(e: Evidence) -> str | None:
    """Find out whether the last rank of a pipeline has right gradients, and those before it wrong ones."""
    if e.lesson != "pipeline_parallel" or not e.ranks or not e.compared or None in e.compared:
        return None
    last = e.ranks - 1
    if last in e.compared or f"rank {last} failed" in e.text or not _are_gradients(e):
        return None
    return (
        f"Rank {last} is right, and gradients before it are wrong: look at what a stage sends back. It must "
        "be the gradient of its input, and not the activation, and the gradients must be sent and received "
        "in the same order of microbatches."
    )


def forward_of_tensor_parallel(e: Evidence) -> str | None:
    """Point to what ranks do in a forward, where the loss is wrong and the same on all ranks."""
    if e.lesson != "tensor_parallel" or e.wrong.keys() != {"loss"} or e.across() != "agree" or not e.first:
        return None
    positions = " Does each rank count positions from its own first token?"
    return (
        "The loss is wrong, and the same on all ranks, so look at the forward. Does a row layer add up the "
        "outputs of all ranks, each from its own inputs? Does a rank add zeros for what it does not own: "
        "tokens of other ranks in an embedding, the vocabulary's padding in the loss?"
        f"{positions if 'sequence_parallel True' in e.first.what else ''}"
    )


def attention_of_a_cut_sequence(e: Evidence) -> str | None:
    """Find out, from what is wrong under which mask, which step of context parallel attention is to blame."""
    if e.lesson != "context_parallel" or not e.first or not {"y", "dq", "dk", "dv"} <= e.first.pairs.keys():
        return None
    if "y" not in e.wrong and "dq" not in e.wrong:
        return (
            "The gradients of queries are right, and those of keys or values are not. These are sums over "
            "the queries of all ranks: does each rank add its term to the gradient of the keys that it has "
            "at the time, and does the last rank send the sum to the rank from which the keys came?"
        )
    if "y" not in e.wrong:
        return (
            "The attention is right and its gradients are wrong. The backward needs the probabilities of the "
            "forward again: their sum is 1 over the keys of all ranks, not over those of one block."
        )
    if "with documents" in e.first.what:
        return (
            "A query attends to keys of other documents, or not to all of its own: does the mask compare the "
            "documents of the queries with those of the keys that arrive, too?"
        )
    if "is_causal True" in e.first.what:
        return (
            "Each query should attend to the keys up to its own position: does the mask compare positions in "
            "the full sequence, and not places within the blocks? Earlier blocks are seen whole, and later "
            "ones not at all."
        )
    return (
        "All pairs attend here, and the result is wrong: does each query meet the keys of each rank once, "
        "and are two results joined in the proportion of their sums of exponentials?"
    )


def tokens_of_a_cut_sequence(e: Evidence) -> str | None:
    """Find out whether a rank's tokens or their targets are taken for others."""
    if e.lesson != "context_parallel" or "loss" not in e.wrong:
        return None
    if "logits" in e.wrong:
        return (
            "The logits are wrong already: a rank's tokens come from several places. Does each token get its "
            "own position in the full sequence?"
        )
    return (
        "The loss is wrong, where the logits may be right: a token's target is the one that follows in the "
        "full sequence, also at the end of a piece. Are the targets cut as the tokens are?"
    )


def conjugate(e: Evidence) -> str | None:
    """Find out whether only the backward of a function of comm is wrong."""
    if e.lesson != "comm" or not e.first or "gradient" not in e.first.what:
        return None
    if not all(one.pairs.keys() - e.wrong_on(one).keys() for one in e.compared.values()):
        return None
    return (
        "The forward is right and the gradient is wrong: the backward must communicate too. If all ranks use "
        "what was gathered, its backward adds up the gradients of all ranks and returns this rank's part; "
        "that of a copy adds them up, and that of a sum over ranks passes them on."
    )


def completed_along_one_axis_too_few(e: Evidence) -> str | None:
    """Find out from the names of wrong gradients along which axis of a mesh they are not completed."""
    if e.lesson != "hybrid_parallel" or not e.first or not e.first.what.startswith("gradient of step"):
        return None
    what, names = e.first.what, e.wrong
    if not names:
        return None
    if "1 (pipeline)" not in what and all(_TIED.fullmatch(name) for name in names):
        shards = (
            " With ZeRO the mean over replicas leaves only shards, and both stages have different ones: is "
            "the sum formed before the mean?"
        )
        return (
            "Two stages hold a copy of a tied weight: both copies must get the sum of both gradients, once."
            f"{'' if 'zero 0' in what else shards}"
        )
    if "sequence parallel" in what and all(_UNDIVIDED.search(name) for name in names):
        return (
            "Only parameters are wrong that the ranks of a tensor group do not divide. Each of these ranks "
            "has seen only its tokens, so their gradients must be added up over the tensor group."
        )
    return None


def cut_sequence_on_a_mesh(e: Evidence) -> str | None:
    """Point to what is different for a part of a sequence, where the loss of the first step is wrong."""
    if e.lesson != "hybrid_parallel" or not e.first or not e.first.what.startswith("loss of step 0"):
        return None
    if "(context)" not in e.first.what:
        return None
    return (
        "The first loss is wrong where sequences are cut. Does each token get its own position in the full "
        "sequence, and its own target? Does attention meet the keys of all ranks?"
    )


def experts_on_a_mesh(e: Evidence) -> str | None:
    """Find out whether the gradients of experts are wrong, and no others."""
    if e.lesson != "hybrid_parallel" or not e.first or not e.first.what.startswith("gradient of step"):
        return None
    if not e.wrong or not all(map(_EXPERT.fullmatch, e.wrong)):
        return None
    factors = {round(one.factor, 4) for one in e.wrong.values()}
    if e.kinds == {"factor"} and len(factors) == 1 and factors.pop() > 1:
        return (
            "Only the gradients of experts are wrong, and as many times too large as ranks share the "
            "experts: tokens of all these ranks add up in a gradient, so it is a sum where a mean is due."
        )
    return (
        "Only the gradients of experts are wrong. They are averaged over copies of an expert, and those of "
        "other experts must not mix with them: which replicas hold the same one?"
    )


def scaled(e: Evidence) -> str | None:
    """Find out whether a step went wrong after its gradients and their norm were right."""
    if not e.first or "its gradients and norm were right" not in e.first.what:
        return None
    return (
        "The gradients and their norm were right before, so look at what changes the parameters: is each "
        "gradient scaled, also one that does not count in the norm, and by at most 1? Does the optimizer "
        "update each parameter, and is it gathered after that?"
    )


def shard(e: Evidence) -> str | None:
    """Find out whether values are wrong only before or after one element, as where a shard ends."""
    if e.lesson != "data_parallel" or e.kinds != {"part"}:
        return None
    for one in e.compared.values():
        for name in e.wrong_on(one):
            got, expected = (side.flatten() for side in one.pairs[name])
            wrong = [relation(g, x) is not None for g, x in zip(got, expected, strict=True)]
            first = wrong.index(True)
            if first and all(wrong[first:]):
                return (
                    f"`{name}` is right up to element {first - 1} and wrong from element {first} on, as "
                    "where one shard ends and the next begins: does each shard have what belongs to its own "
                    "place, and not what belongs to the first one?"
                )
    return None


def _are_gradients(e: Evidence) -> bool:
    return any("grad" in text for one in e.compared.values() for text in (one.what, *one.pairs))


IN_LESSONS: tuple[Callable[[Evidence], str | None], ...] = (
    wrong_activations,
    sent_back,
    forward_of_tensor_parallel,
    attention_of_a_cut_sequence,
    tokens_of_a_cut_sequence,
    conjugate,
    shard,
)

# They come before what is said of any lesson: the names on a mesh say more than how the ranks differ.
ON_A_MESH: tuple[Callable[[Evidence], str | None], ...] = (
    completed_along_one_axis_too_few,
    cut_sequence_on_a_mesh,
    experts_on_a_mesh,
    scaled,
)
