// The formulas of the lessons: memory of ZeRO (zero/memory.py), schedules (pipeline_parallel/analysis/theory.py),
// collectives (comm/cost.py), activations (tensor_parallel/traffic.py), and what tensor, context and expert ranks
// send (hybrid_parallel/planner/step_time.py, context_parallel/traffic.py). Tests compare each function with its lesson's.

/** The parameters of lab/models/model.py's GPT, with one matrix for embedding and head. */
const parametersOf = ({ layers, width, vocabulary, context }) =>
  (vocabulary + context) * width + layers * (12 * width ** 2 + 13 * width) + 2 * width;

/** The parameters of all experts of all layers, if a layer has several in place of its feed-forward network. */
const expertParametersOf = ({ layers, width, experts }) => (experts > 1 ? layers * experts * (8 * width ** 2 + 5 * width) : 0);

/** The parameters that are in no expert, routers included. */
const denseParametersOf = (model) => parametersOf(model) - (model.experts > 1
  ? model.layers * (8 * model.width ** 2 + 5 * model.width - model.experts * model.width) : 0);

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

/** The seconds of an all-to-all in which a rank exchanges `size` bytes with n - 1 others. */
const exchangeSeconds = (size, n, { alpha, beta }) =>
  (n === 1 ? 0 : (n - 1) * (alpha + size * beta / n) + log2Up(n) * alpha);

/** A layer's input of a microbatch on a rank, in bytes: b texts of s / c tokens. */
const streamOf = ({ batch, sequence, contextRanks, width, precision }) =>
  batch * sequence / contextRanks * width * PRECISIONS[precision].bytes;

/** The seconds of the all-reduces of tensor ranks in a layer's forward: after attention, and after each expert. */
const tensorSeconds = (set, link) =>
  (1 + (set.experts > 1 ? set.activeExperts : 1)) * ringSeconds("all_reduce", streamOf(set), set.tensorRanks, link);

/** The seconds in which a layer's forward sends tokens to the experts that they have chosen, and results back. */
const expertSeconds = (set, link) => (set.experts > 1
  ? 2 * exchangeSeconds(streamOf(set) * set.activeExperts, set.expertRanks, link) : 0);

/** The seconds of a ring attention's messages of keys and values in a layer's forward; a backward has twice as many. */
const contextSeconds = (set, { alpha, beta }) =>
  (set.contextRanks - 1) * (alpha + 2 * streamOf(set) / set.tensorRanks * beta);

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
  dualpipe_v: { title: "DualPipeV", chunks: 2, idle: "(p-1) (f + i - w) / 2 for m ≥ 2p" },
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
  const isEqual = p === 1 || (f === i && i === w);
  if (schedule === "dualpipe_v") {
    const isKnown = isEqual || (m >= 2 * p && w <= i && (p - 1) * i <= p * f && f <= i + w);
    return isKnown ? (p - 1) * (f + i - w) / 2 + Math.max(0, 2 * p - m - (m <= p)) * f : null;
  }
  const isKnown = isEqual || (m >= 2 * p - 1 && f <= i && i / 2 <= w && w <= i);
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
  return Math.min(2 * p + (schedule === "dualpipe_v"), 2 * m, m + 1 + rank);
}

/**
 * What autograd keeps of a layer's forward on a rank, for a microbatch of `batch` texts. With 16 bits, t tensor ranks and
 * the attention's matrices that is s b h (10 + 24 / t + 5 a s / (h t)); sequence parallelism divides the 10, too.
 */
function layerActivations(set) {
  const { batch, sequence, width, heads, precision, keepsAttention, tensorRanks: t } = set;
  const each = PRECISIONS[precision].bytes;
  const tokens = batch * sequence / set.contextRanks;
  const chosen = set.experts > 1 ? set.activeExperts : 1;
  const attention = keepsAttention ? heads * sequence * (2 * each + 1) : 0;
  const divided = width * (4 + 8 * chosen) * each + attention;
  const outside = width * (4 * each + 2 + (set.experts > 1 ? 3 * chosen * each : 0));
  return tokens * (divided / t + outside / (set.sequenceParallel ? t : 1));
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
  const { dataRanks, pipelineRanks: p, microbatches: m, tensorRanks: t, contextRanks, expertRanks: e } = set;
  const n = dataRanks * contextRanks; // ranks that hold the same parameters
  const schedule = p === 1 ? "naive" : set.schedule; // without a pipeline: one microbatch after the other
  const { chunks } = SCHEDULES[schedule];
  const isDetailed = set.model === "layers";
  const dense = isDetailed ? denseParametersOf(set) : set.parameters;
  const inExperts = isDetailed ? expertParametersOf(set) : 0;
  const parameters = dense + inExperts;
  const ofDense = ofOneProcess(dense / (p * t), set.precision, set.optimizer);
  const ofExperts = ofOneProcess(inExperts / (p * t * e), set.precision, set.optimizer);
  const full = added(ofDense, ofExperts);
  // An expert has fewer replicas than the other parameters.
  const stages = [0, 1, 2, 3].map((stage) => added(zeroHeld(stage, ofDense, n), zeroHeld(stage, ofExperts, n / e)));

  const most = Math.max(...Array.from({ length: p }, (_, rank) => heldMicrobatches(schedule, p, m, rank)));
  const boundary = isDetailed ? streamOf(set) / (set.sequenceParallel ? t : 1) : null;
  const layersOfStage = isDetailed ? set.layers / (p * chunks) : null;
  // A deferred weight gradient keeps what recomputation would save.
  const recomputed = /^zb|^dualpipe/.test(schedule) ? "nothing" : set.recompute;
  const layer = isDetailed ? layerActivations(set) : null;
  const activations = isDetailed ? activationsHeld(recomputed, most, layersOfStage, layer, boundary) : null;

  const link = { alpha: set.alpha, beta: 8e-9 / set.rate };
  const used = dense + inExperts * set.activeExperts / set.experts; // by a token
  const f = 2 * used / (p * t) * set.batch * set.sequence / contextRanks / set.flops;
  const layersOfRank = isDetailed ? set.layers / p : 0;
  // What nothing hides: a layer waits for the sums of its tensor ranks, and for tokens that come back from experts.
  const tensor = layersOfRank * tensorSeconds(set, { ...link, beta: 8e-9 / set.innerRate });
  const exchange = layersOfRank * expertSeconds(set, link);
  const again = set.recompute === "nothing" ? 1 : 2; // a backward with the forward again
  const waiting = m * (1 + again) * (tensor + exchange);
  const i = again * f;
  const idle = idleSeconds(schedule, p, m, f + tensor + exchange, i + again * (tensor + exchange), f);
  const computing = m * (f + i + f);
  const makespan = idle === null ? null : computing + waiting + idle;
  const context = m * layersOfRank * (2 + again) * contextSeconds(set, link);
  const data = communicationOf(set, ofDense, ofExperts, link);
  const communication = data.seconds + context;
  return {
    schedule, chunks, parameters, full, ofDense, ofExperts, stages, most, boundary, layersOfStage, layer, recomputed, activations,
    f, i, w: f, idle, computing, waiting, tensor: m * (1 + again) * tensor, exchange: m * (1 + again) * exchange, context, makespan,
    data: data.seconds, communication,
    sent: data.sent, ranks: dataRanks * p * t * contextRanks,
    apart: makespan === null ? null : makespan + communication, // nothing is hidden
    together: makespan === null ? null : Math.max(makespan, communication), // all is hidden that can be
    tokens: dataRanks * m * set.batch * set.sequence,
  };
}

const added = (a, b) => Object.fromEntries(Object.keys(a).map((name) => [name, a[name] + b[name]]));

/** The seconds and bytes of a step's collectives over the ranks that hold the same parameters. */
function communicationOf({ stage, microbatches, dataRanks, contextRanks, expertRanks }, ofDense, ofExperts, link) {
  const n = dataRanks * contextRanks;
  const groups = [[ofDense, n], [ofExperts, n / expertRanks]].filter(([{ parameters }, ranks]) => parameters && ranks > 1);
  const all = groups.map(([full, ranks]) => [collectivesOf(stage, full, microbatches), ranks]);
  return {
    seconds: all.reduce((sum, [collectives, ranks]) => sum + secondsSent(collectives, ranks, link), 0),
    sent: all.reduce((sum, [collectives, ranks]) => sum + bytesSent(collectives, ranks), 0),
  };
}

/** Say in a sentence what cannot be divided as it is set, or return "". */
function contradiction({ model, dataRanks, contextRanks, tensorRanks, expertRanks, heads, sequence, experts, activeExperts }) {
  const n = dataRanks * contextRanks;
  if (sequence % contextRanks) return `context c: give a number that divides the ${sequence} tokens of a text.`;
  if (n % expertRanks) return `expert e: give a number that divides the ${n} data and context ranks, n c.`;
  if (model !== "layers") return "";
  if (heads % tensorRanks) return `tensor t: give a number that divides the ${heads} heads.`;
  if (experts % expertRanks) return `expert e: give a number that divides the ${experts} experts.`;
  return activeExperts > experts ? `experts of a token k: give at most ${experts}, the number of experts.` : "";
}
