// The rules of the puzzles: what a table of jobs does, step by step, and whether it solves a puzzle. In a table
// every rank has two rows, one for what it computes and one for what it moves, with a job or "" in each step:
//
//   La       load microbatch a: makes x0a
//   F0a      forward of layer 0 on a: needs w0 and x0a; makes x1a, or in the last layer the loss's gradient
//   B1a      backward: needs w1, x1a and d2a, and frees the last two; makes d1a (layer 0: none), adds a to g1
//   U0       update w0: needs g0, or the rank's shard of g0, with all microbatches in it, and frees it
//   x1a>1    send x1a to rank 1: the sender has it no longer; d1a>0 sends a gradient
//   RSg0     reduce-scatter the gradients g0 of all ranks that have layer 0: each gets the sum's shard
//   AGw0     all-gather the shards of the weights w0; AGg0 those of a gradient
//   -w0      free the full w0; also x, d and g
//
// Jobs of a step start together, with what was there before the step. What they make can be used from the next
// step on. Memory for it is taken when the step starts; what a job frees is given back when the step ends.

const LANES = ["computes", "moves"];
const JOBS = [
  ["computes", "F", /^F(?<layer>\d)(?<micro>\w)$/],
  ["computes", "B", /^B(?<layer>\d)(?<micro>\w)$/],
  ["computes", "U", /^U(?<layer>\d)$/],
  ["moves", "L", /^L(?<micro>\w)$/],
  ["moves", "AG", /^AG(?<kind>[wg])(?<layer>\d)$/],
  ["moves", "RS", /^RS(?<kind>g)(?<layer>\d)$/],
  ["moves", ">", /^(?<kind>[xd])(?<layer>\d)(?<micro>\w)>(?<to>\d)$/],
  ["moves", "-", /^-(?<kind>[xd])(?<layer>\d)(?<micro>\w)$/],
  ["moves", "-", /^-(?<kind>[wg])(?<layer>\d)$/],
];

class Wrong extends Error {}
const wrong = (why) => { throw new Wrong(why); };
const sorted = (letters) => [...letters].sort().join("");

/** A job's parts by name. Throws Wrong for what is no job in this puzzle. */
function parse(puzzle, text, lane) {
  for (const [row, does, pattern] of JOBS) {
    const found = text.match(pattern)?.groups;
    if (!found) continue;
    const { layer, micro, to, kind } = found;
    const job = { does, text, kind, micro, layer: layer && Number(layer), to: to && Number(to) };
    const [first, last] = kind === "d" ? [1, puzzle.layers] : [0, puzzle.layers - 1];
    if (layer && (job.layer < first || job.layer > last)) break;
    if ((micro && !puzzle.microbatches.includes(micro)) || (to && job.to >= puzzle.ranks)) break;
    if (row !== lane) wrong(`${text} belongs into the row of what the rank ${row}.`);
    return job;
  }
  return wrong(`${text} is no job of this puzzle.`);
}

/**
 * What each rank has: items by name, {w0: "old", "g0/n": "ab", x0a: true}. w0 and g0 are full, w0/n and g0/n are
 * shards. Weights are "old", "new", or "mixed" after an update of one shard; a gradient has its microbatches.
 */
class Ranks {
  constructor(puzzle) {
    this.puzzle = puzzle;
    this.items = puzzle.holds.map((holds) => {
      const items = {};
      for (const [layer, kind] of Object.entries(holds)) {
        if (kind !== "shard") items[`w${layer}`] = "old";
        if (kind !== "full") items[`w${layer}/n`] = "old";
      }
      return items;
    });
  }

  group(layer) {
    return this.puzzle.holds.flatMap((holds, rank) => (layer in holds ? [rank] : []));
  }

  memory(rank, items) {
    const { sizes, holds } = this.puzzle;
    let total = 0;
    for (const [layer, kind] of Object.entries(holds[rank])) {
      total += sizes.state / (kind === "full" ? 1 : this.group(layer).length);
    }
    for (const name of Object.keys(items)) {
      if ("xd".includes(name[0])) total += sizes.activation;
      else if (!name.endsWith("/n")) total += sizes.weight;
      else if (name[0] === "g" || !(name.slice(0, -2) in items)) total += sizes.weight / this.group(name[1]).length;
    }
    return total;
  }

  /** What the job does on its rank. Throws Wrong where something that it needs is missing. */
  effect(rank, job) {
    const { does, layer, micro, kind } = job;
    const have = this.items[rank];
    const [w, g] = [`w${layer}`, `g${layer}`];
    if (does === "L") return this.made(rank, [], { [`x0${micro}`]: true });
    if (does === "F" || does === "B") {
      const [x, d] = [`x${layer}${micro}`, `d${layer + 1}${micro}`];
      this.need(rank, ...(does === "F" ? [w, x] : [w, x, d]));
      if (have[w] !== "old") wrong(`${w} is updated already: a step uses the old weights.`);
      const isLast = layer === this.puzzle.layers - 1;
      if (does === "F") return this.made(rank, [], { [isLast ? d : `x${layer + 1}${micro}`]: true });
      const before = have[g] ?? "";
      if ((before + (have[`${g}/n`] ?? "")).includes(micro)) wrong(`${micro} is in ${g} already: it would count twice.`);
      const effect = this.made(rank, [x, d], layer ? { [`d${layer}${micro}`]: true } : {});
      effect.makes[g] = before + micro;
      return effect;
    }
    if (does === ">") return this.sent(rank, job);
    if (does === "-") {
      const name = `${kind}${layer}${micro ?? ""}`;
      this.need(rank, name);
      if (kind === "w" && !(`${w}/n` in have)) wrong(`${w} would be lost: no shard of it is left.`);
      return { takes: [name], makes: {} };
    }
    if (!(layer in this.puzzle.holds[rank])) wrong(`layer ${layer} is not on rank ${rank}.`);
    if (does === "U") return this.updated(rank, layer);
    if (this.group(layer).length === 1) wrong(`no other rank has layer ${layer}.`);
    if (does === "RS") {
      this.need(rank, g);
      return { takes: [g], makes: { [`${g}/n`]: "" } }; // the sum is known when all ranks are
    }
    const gathered = `${kind}${layer}`;
    if (!(`${gathered}/n` in have)) wrong(`rank ${rank} has no shard of ${gathered}.`);
    if ((have[gathered] ?? "mixed") !== "mixed") wrong(`rank ${rank} has ${gathered} already.`);
    return { takes: kind === "g" ? [`${g}/n`] : [], makes: { [gathered]: have[`${gathered}/n`] } };
  }

  need(rank, ...names) {
    const missing = names.filter((name) => !(name in this.items[rank]));
    if (missing.length) wrong(`rank ${rank} has no ${missing.join(" and no ")}.`);
  }

  made(rank, takes, makes) {
    for (const name of Object.keys(makes)) if (name in this.items[rank]) wrong(`rank ${rank} has ${name} already.`);
    return { takes, makes };
  }

  sent(rank, { text: job, to }) {
    const name = job.split(">")[0];
    this.need(rank, name);
    if (to === rank) wrong("a rank cannot send to itself.");
    if (name in this.items[to]) wrong(`rank ${to} has ${name} already.`);
    return { takes: [name], makes: {} };
  }

  updated(rank, layer) {
    const have = this.items[rank];
    const isFull = this.puzzle.holds[rank][layer] === "full";
    const [w, g] = isFull ? [`w${layer}`, `g${layer}`] : [`w${layer}/n`, `g${layer}/n`];
    const everything = this.puzzle.microbatches.join("");
    const inside = sorted(have[g] ?? "");
    if (inside !== everything) {
      wrong(`U${layer} needs ${isFull ? "" : "its shard of "}g${layer} with ${everything},`
        + ` and rank ${rank} has ${inside || "nothing"}.`);
    }
    return { takes: [g], makes: { [w]: "new", ...(!isFull && `w${layer}` in have ? { [`w${layer}`]: "mixed" } : {}) } };
  }

  /** Complete a collective's effects, when all ranks of its group do it. */
  collective(layer, name, moves) {
    const group = this.group(layer);
    for (const rank of group) {
      if (moves[rank]?.job.text !== name) {
        wrong(`all ranks with layer ${layer} do ${name} in one step; rank ${rank} does not.`);
      }
    }
    if (name.startsWith("RS")) {
      const parts = group.map((rank) => this.items[rank][`g${layer}`]).join("");
      for (const rank of group) {
        const total = sorted(parts + (this.items[rank][`g${layer}/n`] ?? ""));
        const double = [...total].find((letter, i) => letter === total[i + 1]);
        if (double) wrong(`${double} would count twice in the sum of g${layer}.`);
        moves[rank].effect.makes[`g${layer}/n`] = total;
      }
    } else if (new Set(group.map((rank) => sorted(Object.values(moves[rank].effect.makes)[0]))).size > 1) {
      wrong(`the shards of ${name.slice(2)} differ: some ranks have gone further than others.`);
    }
  }
}

/**
 * Run a table of two rows for each rank, and return what comes of it. `memory` has each rank's memory in each
 * step, and `problem` the first job that cannot run; nothing runs after that step. `left` says what is missing at
 * the end, `over` where memory is over the budget.
 */
function judge(puzzle, rows) {
  const steps = Math.max(0, ...rows.map((row) => row.findLastIndex((job) => job) + 1));
  const ranks = new Ranks(puzzle);
  const memory = ranks.items.map(() => []);
  let problem = null;
  for (let step = 0; step < steps && !problem; step += 1) problem = runStep(ranks, rows, step, memory);
  const peak = Math.max(...memory.map((row, rank) =>
    (row.length ? Math.max(...row) : ranks.memory(rank, ranks.items[rank]))));
  const { budget } = puzzle;
  const over = memory.flatMap((row, rank) => row.flatMap((held, step) =>
    (held > budget.memory ? [{ rank, step, memory: held }] : [])));
  const left = missing(ranks);
  const solved = !problem && !left.length && !over.length && steps <= budget.steps;
  return { steps, peak, memory, problem, over, left, solved };
}

/** Run the jobs of a step, and return the first problem, or null. */
function runStep(ranks, rows, step, memory) {
  const [moves, effects, arrivals] = [{}, [], {}];
  const problem = (rank, lane, why) => ({ step, rank, lane, why });
  for (const [i, row] of rows.entries()) {
    const [rank, lane] = [Math.floor(i / 2), i % 2];
    const name = row[step];
    if (!name) continue;
    let [job, effect] = [null, null];
    try {
      job = parse(ranks.puzzle, name, LANES[lane]);
      effect = ranks.effect(rank, job);
    } catch (error) {
      if (!(error instanceof Wrong)) throw error;
      return problem(rank, lane, error.message);
    }
    effects.push({ rank, lane, job, effect });
    if (lane) moves[rank] = { job, effect };
    if (job.does === ">") {
      if (job.to in arrivals) {
        return problem(rank, lane, `two messages to rank ${job.to} in one step: its link takes one.`);
      }
      arrivals[job.to] = name.split(">")[0];
    }
  }
  for (const { rank, lane, job } of effects) {
    if (job.does !== "RS" && job.does !== "AG") continue;
    try {
      ranks.collective(job.layer, job.text, moves);
    } catch (error) {
      if (!(error instanceof Wrong)) throw error;
      return problem(rank, lane, error.message);
    }
  }
  for (const [rank, have] of ranks.items.entries()) {
    const [changed, made, taken] = [new Set(), {}, new Set()];
    for (const { lane, effect } of effects.filter((each) => each.rank === rank)) {
      const changes = new Set([...effect.takes, ...Object.keys(effect.makes)]);
      const both = [...changes].filter((name) => changed.has(name)).sort();
      if (both.length) return problem(rank, lane, `both jobs of rank ${rank} change ${both[0]} in this step.`);
      changes.forEach((name) => changed.add(name));
      Object.assign(made, effect.makes);
      effect.takes.forEach((name) => taken.add(name));
    }
    const arriving = arrivals[rank];
    if (arriving) {
      if (changed.has(arriving)) {
        return problem(rank, 0, `${arriving} arrives on rank ${rank}, which makes it in this step.`);
      }
      made[arriving] = true;
    }
    memory[rank].push(ranks.memory(rank, { ...have, ...made }));
    const kept = Object.entries(have).filter(([name]) => !taken.has(name));
    ranks.items[rank] = { ...Object.fromEntries(kept), ...made };
  }
  return null;
}

/** What is not as it should be at the end: all weights that a rank began with are to be new. */
function missing(ranks) {
  const how = { old: "not updated", mixed: "updated in one shard only", freed: "not gathered" };
  return ranks.puzzle.holds.flatMap((holds, rank) => Object.entries(holds).flatMap(([layer, kind]) => {
    const value = ranks.items[rank][kind === "shard" ? `w${layer}/n` : `w${layer}`] ?? "freed";
    return value === "new" ? [] : [`w${layer} of rank ${rank} is ${how[value]}`];
  }));
}
