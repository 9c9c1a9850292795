"""The rules of the puzzles: what a table of jobs does, step by step, and whether it solves a puzzle.

rules.js has the same rules for the page, and a test compares both. In a table every rank has two rows, one
for what it computes and one for what it moves, with a job or "" in each step:

    La       load microbatch a: makes x0a
    F0a      forward of layer 0 on a: needs w0 and x0a; makes x1a, or in the last layer the loss's gradient
    B1a      backward: needs w1, x1a and d2a, and frees the last two; makes d1a (layer 0: none), adds a to g1
    U0       update w0: needs g0, or the rank's shard of g0, with all microbatches in it, and frees it
    x1a>1    send x1a to rank 1: the sender has it no longer; d1a>0 sends a gradient
    RSg0     reduce-scatter the gradients g0 of all ranks that have layer 0: each gets the sum's shard
    AGw0     all-gather the shards of the weights w0; AGg0 those of a gradient
    -w0      free the full w0; also x, d and g

Jobs of a step start together, with what was there before the step. What they make can be used from the next
step on. Memory for it is taken when the step starts; what a job frees is given back when the step ends.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

LANES = ("computes", "moves")
JOBS = (
    ("computes", "F", r"F(?P<layer>\d)(?P<micro>\w)"),
    ("computes", "B", r"B(?P<layer>\d)(?P<micro>\w)"),
    ("computes", "U", r"U(?P<layer>\d)"),
    ("moves", "L", r"L(?P<micro>\w)"),
    ("moves", "AG", r"AG(?P<kind>[wg])(?P<layer>\d)"),
    ("moves", "RS", r"RS(?P<kind>g)(?P<layer>\d)"),
    ("moves", ">", r"(?P<kind>[xd])(?P<layer>\d)(?P<micro>\w)>(?P<to>\d)"),
    ("moves", "-", r"-(?P<kind>[xd])(?P<layer>\d)(?P<micro>\w)"),
    ("moves", "-", r"-(?P<kind>[wg])(?P<layer>\d)"),
)


class Wrong(Exception):
    """Says in a sentence why a job cannot run."""


@dataclass
class Effect:
    """Tell what a job takes away from its rank's items, and what it makes."""

    takes: set[str]
    makes: dict[str, Any]


def parse(puzzle: dict[str, Any], text: str, lane: str) -> dict[str, Any]:
    """Return a job's parts by name. Raises Wrong for what is no job in this puzzle."""
    for row, does, pattern in JOBS:
        found = re.fullmatch(pattern, text)
        if found is None:
            continue
        job = {"does": does, "text": text, **found.groupdict()}
        layer, micro, to = (job.get(name) for name in ("layer", "micro", "to"))
        job["layer"] = None if layer is None else int(layer)
        job["to"] = None if to is None else int(to)
        first, last = (1, puzzle["layers"]) if job.get("kind") == "d" else (0, puzzle["layers"] - 1)
        if layer is not None and not first <= job["layer"] <= last:
            break
        if (micro is not None and micro not in puzzle["microbatches"]) or (
            to and job["to"] >= puzzle["ranks"]
        ):
            break
        if row != lane:
            raise Wrong(f"{text} belongs into the row of what the rank {row}.")
        return job
    raise Wrong(f"{text} is no job of this puzzle.")


class Ranks:
    """Hold the items of each rank, by name: w0 and g0 are full, w0/n and g0/n are shards.

    The value of weights is "old", "new", or "mixed" after an update of one shard; that of a gradient the
    microbatches in it.
    """

    def __init__(self, puzzle: dict[str, Any]) -> None:
        self.puzzle = puzzle
        self.items: list[dict[str, Any]] = []
        for holds in puzzle["holds"]:
            items: dict[str, Any] = {}
            for layer, kind in holds.items():
                items |= {} if kind == "shard" else {f"w{layer}": "old"}
                items |= {} if kind == "full" else {f"w{layer}/n": "old"}
            self.items.append(items)

    def group(self, layer: int) -> list[int]:
        """Return the ranks that have a layer."""
        return [rank for rank, holds in enumerate(self.puzzle["holds"]) if str(layer) in holds]

    def memory(self, rank: int, items: dict[str, Any]) -> float:
        """Return the size of the items and of the rank's optimizer state."""
        sizes, total = self.puzzle["sizes"], 0.0
        for layer, kind in self.puzzle["holds"][rank].items():
            total += sizes["state"] / (1 if kind == "full" else len(self.group(int(layer))))
        for name in items:
            if name[0] in "xd":
                total += sizes["activation"]
            elif not name.endswith("/n"):
                total += sizes["weight"]
            elif name[0] == "g" or name[:-2] not in items:  # a shard of full weights is a part of them
                total += sizes["weight"] / len(self.group(int(name[1])))
        return total

    def effect(self, rank: int, job: dict[str, Any]) -> Effect:
        """Return what the job does on its rank. Raises Wrong where something that it needs is missing."""
        does, layer, micro = job["does"], job["layer"], job.get("micro")
        have = self.items[rank]
        w, g = f"w{layer}", f"g{layer}"
        if does == "L":
            return self.made(rank, set(), {f"x0{micro}": True})
        if does in "FB":
            x, d = f"x{layer}{micro}", f"d{layer + 1}{micro}"
            self.need(rank, w, *([x] if does == "F" else [x, d]))
            if have[w] != "old":
                raise Wrong(f"{w} is updated already: a step uses the old weights.")
            is_last = layer == self.puzzle["layers"] - 1
            if does == "F":
                return self.made(rank, set(), {d if is_last else f"x{layer + 1}{micro}": True})
            before = have.get(g, "")
            if micro in before + have.get(f"{g}/n", ""):
                raise Wrong(f"{micro} is in {g} already: it would count twice.")
            below = {f"d{layer}{micro}": True} if layer else {}
            effect = self.made(rank, {x, d}, below)
            effect.makes[g] = before + str(micro)
            return effect
        if does == ">":
            return self.sent(rank, job)
        if does == "-":
            name = f"{job['kind']}{layer}{micro or ''}"
            self.need(rank, name)
            if job["kind"] == "w" and f"{w}/n" not in have:
                raise Wrong(f"{w} would be lost: no shard of it is left.")
            return Effect({name}, {})
        if str(layer) not in self.puzzle["holds"][rank]:
            raise Wrong(f"layer {layer} is not on rank {rank}.")
        if does == "U":
            return self.updated(rank, layer)
        if len(self.group(layer)) == 1:
            raise Wrong(f"no other rank has layer {layer}.")
        if does == "RS":
            self.need(rank, g)
            return Effect({g}, {f"{g}/n": ""})  # the sum is known when all ranks are
        kind = f"{job['kind']}{layer}"
        if f"{kind}/n" not in have:
            raise Wrong(f"rank {rank} has no shard of {kind}.")
        if have.get(kind, "mixed") != "mixed":
            raise Wrong(f"rank {rank} has {kind} already.")
        return Effect({g + "/n"} if job["kind"] == "g" else set(), {kind: have[f"{kind}/n"]})

    def need(self, rank: int, *names: str) -> None:
        missing = [name for name in names if name not in self.items[rank]]
        if missing:
            raise Wrong(f"rank {rank} has no {' and no '.join(missing)}.")

    def made(self, rank: int, takes: set[str], makes: dict[str, Any]) -> Effect:
        for name in makes:
            if name in self.items[rank]:
                raise Wrong(f"rank {rank} has {name} already.")
        return Effect(takes, makes)

    def sent(self, rank: int, job: dict[str, Any]) -> Effect:
        name, to = job["text"][: job["text"].index(">")], job["to"]
        self.need(rank, name)
        if to == rank:
            raise Wrong("a rank cannot send to itself.")
        if name in self.items[to]:
            raise Wrong(f"rank {to} has {name} already.")
        return Effect({name}, {})

    def updated(self, rank: int, layer: int) -> Effect:
        have, is_full = self.items[rank], self.puzzle["holds"][rank][str(layer)] == "full"
        w, g = (f"w{layer}", f"g{layer}") if is_full else (f"w{layer}/n", f"g{layer}/n")
        what = f"g{layer}" if is_full else f"its shard of g{layer}"
        everything = "".join(self.puzzle["microbatches"])
        inside = "".join(sorted(have.get(g, "")))
        if inside != everything:
            raise Wrong(
                f"U{layer} needs {what} with {everything}, and rank {rank} has {inside or 'nothing'}."
            )
        mixed = {f"w{layer}": "mixed"} if not is_full and f"w{layer}" in have else {}
        return Effect({g}, {w: "new", **mixed})

    def collective(self, layer: int, text: str, effects: dict[int, tuple[Any, Effect]]) -> None:
        """Complete a collective's effects, when all ranks of its group do it."""
        group = self.group(layer)
        for rank in group:
            if rank not in effects or effects[rank][0]["text"] != text:
                raise Wrong(f"all ranks with layer {layer} do {text} in one step; rank {rank} does not.")
        results = [next(iter(effects[rank][1].makes.values())) for rank in group]
        if text.startswith("RS"):
            parts = [self.items[rank][f"g{layer}"] for rank in group]
            for rank in group:
                total = "".join(sorted("".join(parts) + self.items[rank].get(f"g{layer}/n", "")))
                double = [one for one, following in itertools.pairwise(total) if one == following]
                if double:
                    raise Wrong(f"{double[0]} would count twice in the sum of g{layer}.")
                effects[rank][1].makes[f"g{layer}/n"] = total
        elif any("".join(sorted(result)) != "".join(sorted(results[0])) for result in results):
            raise Wrong(f"the shards of {text[2:]} differ: some ranks have gone further than others.")


def judge(puzzle: dict[str, Any], table: list[list[str]]) -> dict[str, Any]:
    """Run a table of two rows for each rank, and return what comes of it.

    `memory` has each rank's memory in each step, and `problem` the first job that cannot run; nothing runs
    after that step. `left` says what is missing at the end, `over` where memory is over the budget.
    """
    used = max((step + 1 for row in table for step, job in enumerate(row) if job), default=0)
    ranks = Ranks(puzzle)
    memory: list[list[float]] = [[] for _ in ranks.items]
    problem: dict[str, Any] | None = None
    for step in range(used):
        problem = run_step(ranks, table, step, memory)
        if problem is not None:
            break
    budget = puzzle["budget"]
    peak = max(max(row, default=ranks.memory(rank, ranks.items[rank])) for rank, row in enumerate(memory))
    over = [
        {"rank": rank, "step": step, "memory": held}
        for rank, row in enumerate(memory)
        for step, held in enumerate(row)
        if held > budget["memory"]
    ]
    left = missing(ranks)
    is_solved = problem is None and not left and not over and used <= budget["steps"]
    return {
        "steps": used, "peak": peak, "memory": memory, "problem": problem, "over": over, "left": left,
        "solved": is_solved,
    }  # fmt: skip


def run_step(
    ranks: Ranks, table: list[list[str]], step: int, memory: list[list[float]]
) -> dict[str, Any] | None:
    """Run the jobs of a step, and return the first problem, if there is one."""
    moves: dict[int, tuple[Any, Effect]] = {}
    effects: list[tuple[int, int, dict[str, Any], Effect]] = []
    arrivals: dict[int, str] = {}

    def wrong(rank: int, lane: int, why: object) -> dict[str, Any]:
        return {"step": step, "rank": rank, "lane": lane, "why": str(why)}

    for number, row in enumerate(table):
        rank, lane = divmod(number, 2)
        text = row[step] if step < len(row) else ""
        if not text:
            continue
        try:
            job = parse(ranks.puzzle, text, LANES[lane])
            effect = ranks.effect(rank, job)
        except Wrong as error:
            return wrong(rank, lane, error)
        effects.append((rank, lane, job, effect))
        if lane == 1:
            moves[rank] = (job, effect)
        if job["does"] == ">":
            if job["to"] in arrivals:
                return wrong(rank, lane, f"two messages to rank {job['to']} in one step: its link takes one.")
            arrivals[job["to"]] = text[: text.index(">")]
    for rank, lane, job, _ in effects:
        if job["does"] in ("RS", "AG"):
            try:
                ranks.collective(job["layer"], job["text"], moves)
            except Wrong as error:
                return wrong(rank, lane, error)
    for rank, have in enumerate(ranks.items):
        changed: set[str] = set()
        made, taken = {}, set()
        for _, lane, _, effect in [each for each in effects if each[0] == rank]:
            changes = effect.takes | set(effect.makes)
            both = sorted(changed & changes)
            if both:
                return wrong(rank, lane, f"both jobs of rank {rank} change {both[0]} in this step.")
            changed |= changes
            made |= effect.makes
            taken |= effect.takes
        if rank in arrivals:
            if arrivals[rank] in changed:
                return wrong(
                    rank, 0, f"{arrivals[rank]} arrives on rank {rank}, which makes it in this step."
                )
            made[arrivals[rank]] = True
        memory[rank].append(ranks.memory(rank, have | made))
        ranks.items[rank] = {name: value for name, value in have.items() if name not in taken} | made
    return None


def missing(ranks: Ranks) -> list[str]:
    """Return what is not as it should be at the end: all weights that a rank began with are to be new."""
    left = []
    for rank, holds in enumerate(ranks.puzzle["holds"]):
        for layer, kind in holds.items():
            w = f"w{layer}/n" if kind == "shard" else f"w{layer}"
            value = ranks.items[rank].get(w, "freed")
            if value != "new":
                how = {"old": "not updated", "mixed": "updated in one shard only", "freed": "not gathered"}[
                    value
                ]
                left.append(f"w{layer} of rank {rank} is {how}")
    return left
