// The formulas of the lessons: memory of ZeRO (zero/memory.py), schedules (pipeline_parallel/analysis/theory.py),
// collectives (comm/cost.py), activations (tensor_parallel/expected_traffic.py). Tests compare each function with its lesson's.

/** The parameters of lab/models/model.py's GPT, with one matrix for embedding and head. */
const parametersOf = ({ layers, width, vocabulary, context }) =>
  (vocabulary + context) * width + layers * (12 * width ** 2 + 13 * width) + 2 * width;

/** Bytes of one number of parameter, of gradient, and of what the optimizer keeps besides its own numbers. */
const PRECISIONS = {
  float32: { title: "32 bits", bytes: 4, copy: 0 },
  bf16: { title: "bf16, and a copy in 32 bits", bytes: 2, copy: 4 },
};
/** How many numbers of 32 bits an optimizer keeps for each parameter. */
const OPTIMIZERS = { adamw: ["AdamW", 2], momentum: ["SGD with momentum", 1], sgd: ["SGD", 0] };

/** P, G and O in bytes, of one process. */
function ofOneProcess(parameters, precision, optimizer) {
  const { bytes: each, copy } = PRECISIONS[precision];
  return {
    parameters: each * parameters,
    gradients: each * parameters,
    optimizer: (copy + 4 * OPTIMIZERS[optimizer][1]) * parameters,
  };
}

/** What one of n ranks holds at a stage of ZeRO. */
const zeroHeld = (stage, full, n) => ({
  parameters: full.parameters / (stage >= 3 ? n : 1),
  gradients: full.gradients / (stage >= 2 ? n : 1),
  optimizer: full.optimizer / (stage >= 1 ? n : 1),
});

/** The seconds of a collective on a ring, headers included, for a full tensor of `size` bytes. */
function ringSeconds(op, size, n, { alpha, beta }) {
  if (n === 1) return 0;
  const turns = op === "all_reduce" ? 2 * (n - 1) : n - 1;
  return turns * (alpha + size * beta / n) + log2Up(n) * alpha;
}

/** The collectives of a step at a stage of ZeRO: [operation, bytes of the full tensor, times]. */
function collectivesOf(stage, { parameters, gradients }, microbatches) {
  return [
    [["all_reduce", gradients, 1]],
    [["reduce_scatter", gradients, 1], ["all_gather", parameters, 1]],
    [["reduce_scatter", gradients, microbatches], ["all_gather", parameters, 1]],
    [["all_gather", parameters, 2 * microbatches], ["reduce_scatter", gradients, microbatches]],
  ][stage];
}
const TRAFFIC = ["2 (n-1)/n G", "(n-1)/n (G + P)", "(n-1)/n (m G + P)", "m (n-1)/n (2 P + G)"];

const bytesSent = (collectives, n) => collectives.reduce((sum, [op, size, times]) =>
  sum + times * size * (op === "all_reduce" ? 2 : 1) * (n - 1) / n, 0);

const secondsSent = (collectives, n, link) => collectives.reduce((sum, [op, size, times]) =>
  sum + times * ringSeconds(op, size, n, link), 0);

/** Of each schedule: its title, its stages on each rank, and the formula of a rank's idle time. */
const SCHEDULES = {
  naive: { title: "naive", chunks: 1, idle: "m (p-1) (f + i + w)" },
  gpipe: { title: "GPipe", chunks: 1, idle: "(p-1) (f + i + w)" },
  "1f1b": { title: "1F1B", chunks: 1, idle: "(p-1) (f + i + w)" },
  interleaved: { title: "interleaved 1F1B", chunks: 2, idle: "(p-1) (f + i + w) / 2 for m ≥ p" },
  zb_h1: { title: "ZB-H1", chunks: 1, idle: "(p-1) (f + i) - (min(m, p) - 1) min(f, i, w)" },
  zb_v: { title: "ZB-V", chunks: 2, idle: "(p-1) i/2 for m ≥ 2p-1" },
};

/** The seconds in which a rank is idle, or null where there is no formula. f, i, w: of a rank for a microbatch. */
function idleSeconds(schedule, p, m, f, i, w) {
  const b = i + w;
  switch (schedule) {
    case "naive": return m * (p - 1) * (f + b);
    case "gpipe": case "1f1b": return (p - 1) * (f + b);
    case "interleaved": return Math.max(0, p - m) * (f + b) + (Math.min(m, p) - 1) * (f + b) / 2;
    case "zb_h1": return (p - 1) * (f + i) - (Math.min(m, p) - 1) * Math.min(f, i, w);
  }
  const isKnown = p === 1 || (f === i && i === w) || (m >= 2 * p - 1 && f <= i && i / 2 <= w && w <= i);
  return isKnown ? Math.max((p - 1) * i / 2, (2 * p - 1 - m) * f) : null;
}

/** The most microbatches that a rank holds at a time, of one of its stages each. */
function heldMicrobatches(schedule, p, m, rank) {
  switch (schedule) {
    case "naive": return 1;
    case "gpipe": return m;
    case "1f1b": return Math.min(m, p - rank);
    case "interleaved": {
      const firstRound = Math.ceil(m / Math.max(1, Math.floor(m / p)));
      return Math.min(2 * m, firstRound + 2 * (p - 1 - rank) + 1);
    }
    case "zb_h1": return Math.min(m, p);
  }
  return Math.min(2 * p, 2 * m, m + 1 + rank);
}

/**
 * What autograd keeps of a layer's forward, for a microbatch of `batch` texts. With 16 bits and the attention's
 * matrices that is s b h (34 + 5 a s / h).
 */
function layerActivations({ batch, sequence, width, heads, precision, keepsAttention }) {
  const each = PRECISIONS[precision].bytes;
  const tokens = batch * sequence;
  const attention = keepsAttention ? heads * sequence * (2 * each + 1) : 0;
  return tokens * (width * (16 * each + 2) + attention);
}

/** What a backward computes again instead of keeping it. */
const RECOMPUTED = { nothing: "keep all", layers: "recompute layers", stages: "recompute stages" };

/**
 * What a rank keeps for the backwards of `most` microbatches of one stage each. Of what is recomputed it keeps the
 * inputs, and all activations of the one layer or stage in which the backward is.
 */
function activationsHeld(recompute, most, layersOfStage, layer, boundary) {
  if (recompute === "layers") return most * layersOfStage * boundary + layer;
  if (recompute === "stages") return most * boundary + layersOfStage * layer;
  return most * layersOfStage * layer;
}

/** All results for what is set; `idle` and what follows from it are null where there is no formula. */
function results(set) {
  const { dataRanks: n, pipelineRanks: p, microbatches: m } = set;
  const schedule = p === 1 ? "naive" : set.schedule; // without a pipeline: one microbatch after the other
  const { chunks } = SCHEDULES[schedule];
  const isDetailed = set.model === "layers";
  const parameters = isDetailed ? parametersOf(set) : set.parameters;
  const full = ofOneProcess(parameters / p, set.precision, set.optimizer);
  const stages = [0, 1, 2, 3].map((stage) => zeroHeld(stage, full, n));

  const most = Math.max(...Array.from({ length: p }, (_, rank) => heldMicrobatches(schedule, p, m, rank)));
  const boundary = isDetailed ? set.batch * set.sequence * set.width * PRECISIONS[set.precision].bytes : null;
  const layersOfStage = isDetailed ? set.layers / (p * chunks) : null;
  // A deferred weight gradient keeps what recomputation would save.
  const recomputed = schedule.startsWith("zb") ? "nothing" : set.recompute;
  const layer = isDetailed ? layerActivations(set) : null;
  const activations = isDetailed ? activationsHeld(recomputed, most, layersOfStage, layer, boundary) : null;

  const f = 2 * parameters / p * set.batch * set.sequence / set.flops;
  const i = set.recompute === "nothing" ? f : 2 * f; // the forward again
  const idle = idleSeconds(schedule, p, m, f, i, f);
  const computing = m * (f + i + f);
  const makespan = idle === null ? null : computing + idle;
  const collectives = n === 1 ? [] : collectivesOf(set.stage, full, m);
  const communication = secondsSent(collectives, n, { alpha: set.alpha, beta: 8e-9 / set.rate });
  return {
    schedule, chunks, parameters, full, stages, most, boundary, layersOfStage, layer, recomputed, activations, f, i, w: f, idle,
    computing, makespan, communication,
    sent: bytesSent(collectives, n),
    apart: makespan === null ? null : makespan + communication, // nothing is hidden
    together: makespan === null ? null : Math.max(makespan, communication), // all is hidden that can be
    tokens: n * m * set.batch * set.sequence,
  };
}
