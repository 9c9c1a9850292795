// Ways to send less (low_communication): bytes, memory and time of a step beside those of plain data parallel.

/** The matrices of a rank's parameters, [rows, columns, how many]: first those outside experts, then those in experts. */
function matricesOf({ layers, width, vocabulary, context, experts, pipelineRanks: p, tensorRanks: t, expertRanks: e }) {
  const part = width / t;
  const feedForward = (times) => [[4 * part, width, times], [width, 4 * part, times]];
  const dense = [[vocabulary / t, width, 1 / p], [context / t, width, 1 / p], [part, width, 3 * layers / p], [width, part, layers / p]];
  return experts > 1 ? [[...dense, [experts / t, width, layers / p]], feedForward(layers * experts / (p * e))]
    : [[...dense, ...feedForward(layers / p)], []];
}

/** The collectives of PowerSGD, or null where the matrices are not known: P with all that is in no thin matrix, then Q. */
function powerCollectives({ numbers, matrices }, { columns: r }) {
  if (matrices === null) return null;
  const thin = matrices.filter(([rows, columns]) => (rows + columns) * r < rows * columns);
  const sum = (of) => thin.reduce((all, [rows, columns, times]) => all + times * of(rows, columns), 0);
  const rest = Math.max(0, numbers - sum((rows, columns) => rows * columns));
  return [["all_reduce", 4 * (rest + r * sum((rows) => rows)), 1], ["all_reduce", 4 * r * sum((_, columns) => columns), 1]];
}

const int8Bytes = ({ numbers, ranks }) => 1028 * ranks * Math.ceil(numbers / (1024 * ranks));
const summed = ({ parameters, gradients, optimizer }) => parameters + gradients + optimizer;
const withError = ({ full }) => summed(full) + full.gradients;
const compressors = "{{lesson low_communication/compressors.py}}";

/**
 * Of each way: what a rank sends in a step, as [operation, bytes of the full tensor, times], the formula of its bytes, and
 * what a rank holds. A way that `waits` sends nothing while the rank computes. `group`: ranks with the same parameters.
 */
const WAYS = {
  plain: {
    title: () => "plain data parallel", formula: "2 (n-1)/n G", lesson: "{{lesson data_parallel/train_bucket_overlap.py}}",
    collectives: ({ full }) => [["all_reduce", full.gradients, 1]], held: ({ full }) => summed(full),
  },
  bf16: {
    title: () => "bf16", formula: "2 (n-1)/n 2 N, which saves nothing if gradients are bf16", lesson: compressors,
    collectives: ({ numbers }) => [["all_reduce", 2 * numbers, 1]], held: withError,
  },
  int8: {
    title: () => "int8", formula: "2 (n-1)/n 1,028/1,024 N", lesson: compressors,
    collectives: (group) => [["all_to_all", int8Bytes(group), 1], ["all_gather", int8Bytes(group), 1]], held: withError,
  },
  topk: {
    title: ({ share }) => `top-k, ${number(100 * share)} %`, formula: "(n-1) 8 bytes for each number that is kept", lesson: compressors,
    collectives: ({ numbers, ranks }, { share }) => [["all_gather", 8 * ranks * Math.max(1, Math.round(share * numbers)), 1]],
    held: withError,
  },
  powersgd: {
    title: ({ columns }) => `PowerSGD, r = ${columns}`, lesson: compressors,
    formula: "2 (n-1)/n 4 (V + r × rows and columns of all matrices), with V numbers outside of them",
    collectives: powerCollectives, held: withError,
  },
  localSgd: {
    title: ({ syncEvery }) => `local SGD, H = ${syncEvery}`, formula: "2 (n-1)/n P / H, and the step waits for them", lesson: "{{lesson low_communication/train_local_sgd.py}}",
    collectives: ({ full }, { syncEvery }) => [["all_reduce", full.parameters, 1 / syncEvery]],
    held: ({ full }) => summed(full), waits: true,
  },
  diloco: {
    title: ({ syncEvery }) => `DiLoCo, H = ${syncEvery}`, formula: "2 (n-1)/n P / H, and the step waits for them", lesson: "{{lesson low_communication/train_diloco_plain.py}}",
    collectives: ({ full }, { syncEvery }) => [["all_reduce", full.parameters, 1 / syncEvery]],
    held: ({ full }) => summed(full) + 2 * full.parameters, waits: true,
  },
  streaming: {
    title: () => "DiLoCo with a delay", formula: "2 (n-1)/n P / H, while the training goes on",
    lesson: "{{lesson low_communication/train_diloco.py}}",
    collectives: ({ full }, { syncEvery }) => [["all_reduce", full.parameters, 1 / syncEvery]],
    held: ({ full }) => summed(full) + 2 * full.parameters,
  },
  zero3: {
    title: () => "ZeRO 3", formula: "m (n-1)/n (2 P + G)", lesson: "{{lesson zero/train_zero3.py}}",
    collectives: ({ full }, { microbatches }) => collectivesOf(3, full, microbatches),
    held: ({ full, ranks }) => summed(full) / ranks,
  },
  hsdp: {
    title: ({ machineRanks }) => `HSDP, g = ${machineRanks}`, lesson: "{{lesson low_communication/train_hsdp.py}}",
    formula: "a machine: 2 (k-1)/k G on k = n/g machines; a rank within it: m (g-1)/g (2 P + G)",
    held: ({ full }, { machineRanks }) => summed(full) / machineRanks,
  },
};

/** The bytes and seconds of a way in one group, or null if they have no formula. The ranks of a machine share its link. */
function groupCost(way, group, given, link) {
  if (way === "hsdp") {
    const { machineRanks: g, microbatches } = given;
    const machines = group.ranks / g;
    if (!Number.isInteger(machines)) return null;
    const between = [["all_reduce", group.full.gradients / g, 1]];
    const within = secondsSent(collectivesOf(3, group.full, microbatches), g, { ...link, beta: 8e-9 / given.innerRate });
    return {
      sent: g * bytesSent(between, machines),
      seconds: within + secondsSent(between, machines, { ...link, beta: g * link.beta }),
    };
  }
  const collectives = WAYS[way].collectives(group, given);
  return collectives && { sent: bytesSent(collectives, group.ranks), seconds: secondsSent(collectives, group.ranks, link) };
}

/** For each way its bytes, its seconds on the wire, and the seconds of a step; null where there is no formula. */
function waysOf(given) {
  const result = results(given);
  const { bytes: each } = PRECISIONS[given.precision];
  const matrices = given.model === "layers" ? matricesOf(given) : [null, null];
  const n = given.dataRanks * given.contextRanks;
  const groups = [[result.ofDense, n], [result.ofExperts, n / given.expertRanks]].map(([full, ranks], i) =>
    ({ full, ranks, numbers: full.parameters / each, matrices: matrices[i] })).filter(({ numbers }) => numbers);
  const link = { alpha: given.alpha, beta: 8e-9 / given.rate };
  return Object.fromEntries(Object.entries(WAYS).map(([way, { held, waits }]) => {
    const costs = groups.map((group) => groupCost(way, group, given, link));
    if (costs.includes(null)) return [way, null];
    const [sent, wire] = ["sent", "seconds"].map((name) => costs.reduce((sum, cost) => sum + cost[name], 0));
    const { makespan, context } = result;
    const step = waits ? Math.max(makespan, context) + wire : Math.max(makespan, wire + context);
    const memory = groups.reduce((sum, group) => sum + held(group, given), 0);
    return [way, { sent, wire, memory, step: makespan === null ? null : step }];
  }));
}

/** The share of plain data parallel's step that a way takes, at a rate in Gbit/s; NaN where there is no formula. */
const shareAt = (given, rate, way) => {
  const costs = waysOf({ ...given, rate });
  return costs.plain.step === null ? NaN : costs[way].step / costs.plain.step;
};

/**
 * The rate in Gbit/s, 3 digits of it, from which on a way's step is as long as plain data parallel's: 0 if it is at every
 * rate, null where slow links have no formula.
 */
function stopsAt(given, way) {
  const pays = (power) => shareAt(given, 10 ** power, way) < 1 - 1e-6;
  let [low, high] = [-3, 5];
  if (Number.isNaN(shareAt(given, 10 ** low, way))) return null;
  if (!pays(low)) return 0;
  if (pays(high)) return Infinity;
  while (high - low > 1e-4) {
    const middle = (low + high) / 2;
    if (pays(middle)) low = middle;
    else high = middle;
  }
  return Number((10 ** low).toPrecision(3));
}

const rated = (rate) => inUnit(rate, [["Gbit/s", 1], ["Mbit/s", 1e-3]]);
const RATES = [0.1, 0.2, 1, 10, 100, 400]; // Gbit/s

function drawSendingLess() {
  const costs = waysOf(set);
  const { plain } = costs;
  const isAlone = set.dataRanks * set.contextRanks === 1;
  $("less-tables").hidden = isAlone;
  $("less-words").textContent = isAlone ? "One rank alone sends no gradients: set data n to 2 or more."
    : `At ${rated(set.rate)}, plain data parallel sends ${bytes(plain.sent)} a rank in a step, and that takes ${seconds(plain.wire)}.`
      + (plain.step === null ? "" : ` Its step takes ${seconds(plain.step)} if communication overlaps with computing as far as it can.`);
  if (isAlone) return;
  const unknown = { hsdp: "give a number g that divides n", powersgd: "describe the model by its layers to see it" };
  $("less-table").innerHTML = table(["", "bytes that are sent", "lesson", "a rank holds", "in a step", "on the wire", "step", "of plain's"],
    Object.entries(WAYS).map(([way, { title, formula, lesson }]) => {
      if (costs[way] === null) return [title(set), unknown[way], lesson, "", "", "", "", ""];
      const { sent, wire, memory, step } = costs[way];
      const share = step === null ? "" : shareWords(step / plain.step);
      return [title(set), formula, lesson, bytes(memory), bytes(sent), seconds(wire), secondsOrNone(step), share];
    }));
  $("less-rates").hidden = plain.step === null;
  if (plain.step === null) return;
  const shown = Object.keys(WAYS).filter((way) => costs[way] !== null && way !== "plain");
  $("less-rates").innerHTML = table(["step", "pays below", ...RATES.map(rated)], [
    [WAYS.plain.title(set), "", ...RATES.map((rate) => secondsOrNone(waysOf({ ...set, rate }).plain.step))],
    ...shown.map((way) => [WAYS[way].title(set), limitWords(stopsAt(set, way)), ...RATES.map((rate) => shaded(shareAt(set, rate, way)))]),
  ]);
}

const secondsOrNone = (value) => (value === null ? "" : seconds(value));
const limitWords = (rate) => ({ null: "", 0: "never", Infinity: "always" })[rate] ?? rated(rate);
const shareWords = (share) => (share < 0.001 ? "&lt; 0.001" : String(Number(share.toPrecision(2))));

/** A share of plain data parallel's step; the more it saves, the darker. */
function shaded(share) {
  if (Number.isNaN(share)) return "";
  const saved = (60 * (1 - share)).toFixed(0);
  return share < 0.995 ? `<span class="pays" style="--saved: ${saved}%">${shareWords(share)}</span>` : shareWords(share);
}
