"""Say in at most ten rows and two sentences what a run has shown, and what to run next.

The rows come from the report's figures (docs/report.md); a row appears only if the run has its figures.
"""

from typing import Any

from lab import units
from lab.launch.threads import own_cores

Figures = dict[str, Any]

NEXT = {
    "train": "RUN_MODE=data_parallel_naive keeps the replicas equal.",
    "data_parallel_naive": "MODES='naive overlap buckets' ARGS='--link 200mbit,1ms --steps 20' shows "
    "how much of it the backward can hide, with all three on one simulated slow link.",
    "data_parallel_naive_grad_accumulation": "ARGS='--grad-acc-steps 4' sends as many bytes a step.",
    "data_parallel_overlap": "MODES='overlap buckets' ARGS='--link 200mbit,1ms --steps 20' shows what fewer "
    "and larger messages gain, with both on one simulated slow link.",
    "data_parallel_bucket_overlap": "ARGS='--link 200mbit,1ms --trace traces' draws the timelines of a slow "
    "link into traces/.",
    "data_parallel_ddp": "RUN_MODE=data_parallel_bucket_overlap is the same idea in 215 lines.",
    "zero1_textbook": "RUN_MODE=zero1 sends the gradients in buckets, while the backward computes.",
    "zero1": "RUN_MODE=zero2 also divides the gradients.",
    "zero2": "RUN_MODE=zero3 also divides the parameters.",
    "zero3": "RUN_MODE=fsdp is PyTorch's own.",
    "fsdp": "RUN_MODE=zero3 is the same idea in one file.",
    "tensor_parallel": "RUN_MODE=sequence_parallel also divides what lies between the layers.",
    "sequence_parallel": "RUN_MODE=tensor_parallel sends the same bytes and keeps more activations.",
    "tensor_parallel_native": "RUN_MODE=tensor_parallel is the same idea with our own layers.",
    "pipeline_model_parallel": "RUN_MODE=pipeline_afab lets the ranks work at the same time.",
    "pipeline_afab": "RUN_MODE=pipeline_1f1b_by_hand has the same bubble and keeps fewer activations.",
    "pipeline_1f1b_by_hand": "RUN_MODE=pipeline_1f1b runs the same order from a table.",
    "pipeline_1f1b": "RUN_MODE=pipeline_interleaved has a smaller bubble.",
    "pipeline_interleaved": "RUN_MODE=pipeline_zero_bubble fills the bubble with weight gradients.",
    "pipeline_zero_bubble": "ARGS='--schedule zb_v' has a still smaller bubble.",
    "pipeline_native": "RUN_MODE=pipeline_1f1b is the same idea with our own executor.",
    "context_ring": "RUN_MODE=context_all_to_all sends the heads instead of keys and values.",
    "context_all_to_all": "RUN_MODE=context_ring works with more ranks than heads.",
    "expert_parallel": "ARGS='--balance bias' balances the experts without a loss.",
    "local_sgd": "RUN_MODE=diloco_plain gives the ranks' mean change to an outer optimizer.",
    "diloco_plain": "RUN_MODE=diloco can send it in fragments, and in few bits, while the training goes on.",
    "diloco_elastic": "RUN_MODE=hybrid_elastic synchronises in each step, so the others have to repeat one.",
    "diloco": "ARGS='--fragments 4 --delay 2' sends a part at a time, while the training goes on.",
    "data_parallel_compressed": "MODES='buckets data_parallel_compressed' ARGS='--link 200mbit --steps 20' "
    "compares it with gradients that are not compressed, on the same slow link.",
    "hsdp": "MODES='zero3 hsdp' ARGS='--link 200mbit,1ms --steps 20' shows what is gained where fewer bytes "
    "cross the slow link.",
    "hybrid": "WORLD_SIZE=8 also has two replicas.",
    "hybrid_elastic": "RUN_MODE=hybrid_elastic_mesh does this where a rank's state is in no other rank.",
    "hybrid_elastic_mesh": "RUN_MODE=hybrid trains on a mesh without deaths.",
}
"""What to run after each RUN_MODE, and why: the end of a sentence that begins with `make run`, or, before
MODES, with `make compare`. A run differs in one thing from the one before it; two runs are compared."""


def rows(figures: Figures) -> list[tuple[str, str]]:
    """Return a short report: at most ten pairs of a name and a value."""
    found = {name: value for name, value in figures.items() if value is not None}
    if figures["world_size"] == 1:
        found["communication_seconds"] = 0.0  # the calls of collectives, which send nothing
    named = [(name, value(found)) for name, value in ROWS.items()]
    return [(name, value) for name, value in named if value]


def sentences(figures: Figures) -> list[str]:
    """Return one sentence about what the figures mean, if they tell it, and one about what to run next."""
    mode, ranks = figures["run_mode"], figures["world_size"]
    if ranks == 1:
        return [f"One rank sends nothing: make run RUN_MODE={mode} WORLD_SIZE=2 divides the work."]
    found = {name: value for name, value in figures.items() if value is not None}
    said = [text for rule in MEANINGS if (text := rule(found))][:1]
    what = NEXT.get(mode, "")
    if (schedule := figures.get("schedule", "zb_h1")) != "zb_h1":
        what = f"RUN_MODE=pipeline_native ARGS='--schedule {schedule}' is PyTorch's own."
    if what and f"WORLD_SIZE={ranks} " not in what:
        target = "compare" if what.startswith("MODES") else "run"
        ranks_too = "" if ranks == 2 or "WORLD_SIZE" in what else f"WORLD_SIZE={ranks} "
        mode_too = "" if what.startswith(("MODES", "RUN_MODE")) else f"RUN_MODE={mode} "
        said.append(f"make {target} {ranks_too}{mode_too}{what}")
    return said


def _loss(f: Figures) -> str | None:
    if "first_loss" not in f or "last_loss" not in f:
        return None
    held_out = f"; {f['validation_loss']:.3f} on held-out data" if "validation_loss" in f else ""
    return f"{f['first_loss']:.3f} at first, {f['last_loss']:.3f} at last{held_out}"


def _step(f: Figures) -> str | None:
    if "step_seconds" not in f:
        return None
    predicted = f.get("predicted_step_seconds") or 0.0
    is_near = abs(predicted / f["step_seconds"] - 1) <= 0.3  # else ranks share cores: see docs/report.md
    by_formula = f" (predicted {units.show_seconds(predicted)})" if is_near else ""
    what = "images" if "accuracy" in f or "validation_accuracy" in f else "tokens"
    speed = f"{f['tokens_per_second']:,.0f} {what}/s"
    used = f", MFU {f['mfu']:.0%}" if "mfu" in f else ""
    return f"{units.show_seconds(f['step_seconds'])}{by_formula}, {speed}{used}"


def _computing(f: Figures) -> str | None:
    if not f.get("compute_seconds"):
        return None
    return f"{units.show_seconds(f['compute_seconds'])} of the step"


def _communication(f: Figures) -> str | None:
    if not f.get("communication_seconds"):
        return None
    shares = f"{f['hidden_share']:.0%} of it hidden, {f['blocking_share']:.0%} blocking"
    return f"{units.show_seconds(f['communication_seconds'])} of the step: {shares}"


def _neither(f: Figures) -> str | None:
    if not f.get("communication_seconds"):
        return None
    busy = f["compute_seconds"] + f["communication_seconds"] * (1 - f["hidden_share"])
    rest = f["step_seconds"] - busy
    return f"{units.show_seconds(rest)} of the step" if rest > 0.1 * f["step_seconds"] else None


def _sent(f: Figures) -> str | None:
    if not f.get("bytes_sent"):
        return None
    size = units.show_bytes(f["bytes_sent"] / f["steps"])
    messages = f["messages_sent"] / f["steps"]
    number = f"{messages:,.0f}" if messages >= 10 or messages.is_integer() else f"{messages:.1f}"
    sent = f"{size} in {number} message{'s' * (number != '1')} a step"
    if not f.get("bytes_formula"):
        return sent
    return sent + _checked(f, ("bytes_sent", "messages_sent"), ("bytes_formula", "messages_formula"))


def _checked(f: Figures, counted: tuple[str, ...], formulas: tuple[str, ...]) -> str:
    """Say whether what was counted equals the formula."""
    values = [f.get(name) for name in formulas]
    if [f[name] for name in counted] == values:
        return ", as the formula says"
    found = " and ".join(f"{f[name]:,}" for name in counted)
    return f"; {found} in all, where the formula says {' and '.join(format(v, ',') for v in values)}"


def _memory(f: Figures) -> str | None:
    return units.show_bytes(f["peak_memory_bytes"]) if "peak_memory_bytes" in f else None


def _state(f: Figures) -> str | None:
    if "formula_parameters_bytes" not in f:
        return None
    names = ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes")
    parts = ", ".join(
        f"{units.show_bytes(f[name])} of {name.removesuffix('_bytes').replace('_', ' ')}" for name in names
    )
    return parts + _checked(f, names, tuple(f"formula_{name}" for name in names))


def _bubble(f: Figures) -> str | None:
    if "bubble" not in f:
        return None
    took = units.show_seconds(f["makespan_seconds"])
    return f"{f['bubble']:.0%} of {took}; by formula {f['bubble_formula']:.0%}"


def _kept(f: Figures) -> str | None:
    if "activations_bytes" not in f:
        return None
    kept = f["activations_bytes"]
    of_each = kept if isinstance(kept, list) else [kept]
    held = f.get("microbatches_held")
    of_microbatches = f" (of {', '.join(map(str, held))} microbatches)" if held else ""
    return ", ".join(map(units.show_bytes, of_each)) + of_microbatches


def _compared_by(f: Figures) -> str | None:
    return f.get("compared_by")


def _of_a_block(f: Figures) -> str | None:
    if "block_bytes" not in f:
        return None
    return units.show_bytes(f["block_bytes"]) + _checked(f, ("block_bytes",), ("block_bytes_formula",))


def _experts(f: Figures) -> str | None:
    if "imbalance" not in f:
        return None
    most = f"the busiest one got {f['imbalance']:.2f} times its share"
    return f"{most}; {f['dropped_tokens']:,} tokens were dropped"


def _sent_along(f: Figures) -> dict[str, int]:
    """Return the bytes that rank 0 has sent along each axis of a mesh."""
    names = [name for name in f if name.startswith("axis_") and name.endswith("_bytes_sent")]
    return {name.removeprefix("axis_").removesuffix("_bytes_sent"): f[name][0] for name in names}


def _axes(f: Figures) -> str | None:
    parts = (f"{axis} {units.show_bytes(sent)}" for axis, sent in _sent_along(f).items())
    return "rank 0 sent " + ", ".join(parts) if _sent_along(f) else None


def _drift(f: Figures) -> str | None:
    return ", ".join(f"{value:.3f}" for value in f["drift"]) if "drift" in f else None


def _accuracy(f: Figures) -> str | None:
    return ", ".join(f"{value:.3f}" for value in f["accuracy"]) if "accuracy" in f else None


def _replicas(f: Figures) -> str | None:
    if f["world_size"] == 1 or "replicas_equal" not in f:
        return None
    return "bitwise equal on all ranks" if f["replicas_equal"] else "differ"


ROWS = {
    "loss": _loss,
    "step": _step,
    "computing": _computing,
    "communication": _communication,
    "neither": _neither,
    "a rank sent": _sent,
    "peak memory": _memory,
    "a rank keeps": _state,
    "activations": _kept,
    "bubble": _bubble,
    "compare by": _compared_by,
    "a block sends": _of_a_block,
    "experts": _experts,
    "axes": _axes,
    "drift": _drift,
    "accuracy": _accuracy,
    "replicas": _replicas,
}
"""Each row's name, and the function that returns its value, or None where the run has no such figures."""


def _drifted(f: Figures) -> str | None:
    return "Each rank has trained a model of its own, on its part of the data." if "drift" in f else None


def _idle(f: Figures) -> str | None:
    if "bubble" not in f:
        return None
    idle = f"The ranks were idle for {f['bubble']:.0%} of the step"
    cores = len(own_cores())
    if "metronome" not in f and f["world_size"] > cores:
        shared = f"{f['world_size']} ranks share {cores} cores"
        return f"{idle}, but {shared}: ARGS='--metronome 20ms' shows the schedule alone."
    return f"{idle}; by formula {f['bubble_formula']:.0%}, which more --microbatches make smaller."


def _where_time_goes(f: Figures) -> str | None:
    if not f.get("communication_seconds"):
        return None
    took = units.show_seconds(f["communication_seconds"])
    share = f["communication_seconds"] / f["step_seconds"]
    if f["blocking_share"] > 0.99:
        whole = f"All of the {took} of communication, {share:.0%} of the step, blocks"
        return f"{whole}: the rank computes nothing meanwhile."
    hidden, seen = f["hidden_share"], f["communication_seconds"] * (1 - f["hidden_share"])
    return (
        f"{hidden:.0%} of the {took} of communication is hidden behind computing; the other "
        f"{units.show_seconds(seen)} make the step longer."
    )


def _present(f: Figures) -> str | None:
    if "joins" not in f:
        return None
    return (
        f"{len(f['survivors'])} ranks were there at the end, and {f['joins']} had come back meanwhile; a "
        "synchronisation takes the mean over those who are there."
    )


def _alone(f: Figures) -> str | None:
    if (steps := f.get("sync_every", 1)) == 1:
        return None
    return (
        f"Each rank trains alone for {steps} steps, and drifts away from the others; the time and the bytes "
        "of a step are means over such a round, with its synchronisation."
    )


def _busiest_axis(f: Figures) -> str | None:
    sent = _sent_along(f)
    if len(sent) < 2 or not sum(sent.values()):
        return None
    most = max(sent, key=lambda axis: sent[axis])
    share = f"{sent[most] / sum(sent.values()):.0%} of what rank 0 sent"
    return f"{share} went along the {most} axis: its ranks belong where the links are fastest."


def _compressed(f: Figures) -> str | None:
    if "bytes_share" not in f:
        return None
    return f"The gradients took {f['bytes_share']:.1%} of the bytes that they have uncompressed."


def _between_machines(f: Figures) -> str | None:
    if f.get("machines", 1) == 1:
        return None
    share = f["replicas_bytes_sent"] / f["bytes_sent"]
    return f"{share:.0%} of what rank 0 sent left its machine: gradients of its shard, averaged there before."


def _unseen(f: Figures) -> str | None:
    is_unseen = "only with --link" in f.get("not_measured", "")
    return "Only a simulated link shows what is hidden: add ARGS='--link 1gbit'." if is_unseen else None


MEANINGS = (
    _drifted,
    _present,
    _alone,
    _idle,
    _busiest_axis,
    _compressed,
    _between_machines,
    _where_time_goes,
    _unseen,
)
"""What a run means: the first of these that has something to say."""
