// The results in words, bars and tables.

const KINDS = ["parameters", "gradients", "optimizer", "activations"];

function draw() {
  const isDetailed = set.model === "layers";
  const wrong = contradiction(set);
  if (wrong) {
    $("complaint").textContent = wrong;
    return;
  }
  $("of-layers").hidden = !isDetailed;
  $("of-parameters").hidden = isDetailed;
  $("options").hidden = $("recompute").hidden = !isDetailed;
  $("heads").closest("label").hidden = !set.keepsAttention && set.tensorRanks === 1;
  $("activeExperts").closest("label").hidden = set.experts === 1;
  document.querySelector("[value=sequenceParallel]").closest("label").hidden = set.tensorRanks === 1;
  $("schedule").hidden = set.pipelineRanks === 1;
  const result = results(set);
  drawSummary(result);
  drawMemory(result);
  drawTime(result);
  drawSplits();
  drawSendingLess();
  link(set);
}

const total = (held, { activations }) => held.parameters + held.gradients + held.optimizer + (activations ?? 0);
const count = (value) => (value < 1e6 ? Number(value.toPrecision(4)).toLocaleString("en")
  : inUnit(value, [["trillion", 1e12], ["billion", 1e9], ["million", 1e6]]));

function drawSummary(result) {
  const needed = total(result.stages[set.stage], result);
  const needs = needed <= set.capacity ? `needs <b>${bytes(needed)}</b> of its ${bytes(set.capacity)}`
    : `needs <b>${bytes(needed)}</b>, and has only ${bytes(set.capacity)}`;
  const step = result.makespan === null ? "There is no formula for the time of this schedule with these numbers."
    : `A step takes ${seconds(result.together)} if communication overlaps with computing as far as it can`
      + `${result.communication > result.makespan ? " (here the link is slower)" : ""}, and ${seconds(result.apart)} if nothing overlaps:`
      + ` ${count(result.tokens / result.together)} or ${count(result.tokens / result.apart)} tokens a second.`;
  $("summary").innerHTML = `<b>${count(result.parameters)} parameters on ${result.ranks} rank${result.ranks > 1 ? "s" : ""}.</b>`
    + ` A rank ${needs}. ${step}`;
}

/** A bar of parts, each [kind, value]; the full width stands for `most`. */
function bar(parts, most) {
  const pieces = parts.map(([kind, value]) => `<i class="${kind}" style="width: ${(100 * value / most).toFixed(3)}%"></i>`);
  return `<span class="bar" aria-hidden="true">${pieces.join("")}</span>`;
}

const verdict = (needed) => (needed <= set.capacity ? "" : `<small>too much</small>`);

function drawMemory(result) {
  const { stages, activations, full } = result;
  const divided = `parameters / ${set.tensorRanks > 1 ? "(p t)" : "p"}${set.experts > 1 ? ", those of experts / e" : ""}`;
  const most = Math.max(set.capacity, total(stages[0], result));
  $("bars").innerHTML = stages.map((held, stage) => {
    const parts = KINDS.map((kind) => [kind, kind === "activations" ? activations ?? 0 : held[kind]]);
    return `<div class="line${stage === set.stage ? " chosen" : ""}"><span>${stage ? `ZeRO ${stage}` : "no ZeRO"}</span>`
      + `${bar(parts, most)}<b>${bytes(total(held, result))}${verdict(total(held, result))}</b></div>`;
  }).join("") + `<div class="line limit"><span>a rank has</span>${bar([["limit", set.capacity]], most)}<b>${bytes(set.capacity)}</b></div>`;

  const chosen = stages[set.stage];
  const shard = (least) => (set.stage >= least ? " / n" : "");
  const { bytes: each, copy } = PRECISIONS[set.precision];
  const numbers = OPTIMIZERS[set.optimizer][1];
  const zero = "{{lesson zero/memory.py}}";
  const rows = [
    ["parameters", `P${shard(3)}, with P = ${each} bytes × ${divided}`, zero, bytes(full.parameters), bytes(chosen.parameters)],
    ["gradients", `G${shard(2)}, with G = ${each} bytes × ${divided}`, zero, bytes(full.gradients), bytes(chosen.gradients)],
    ["optimizer state", `O${shard(1)}, with O = ${copy + 4 * numbers} bytes × ${divided}`,
      zero, bytes(full.optimizer), bytes(chosen.optimizer)],
    ["activations", activationWords(result), "{{lesson tensor_parallel/traffic.py}}, {{lesson pipeline_parallel/analysis/theory.py}}",
      activations === null ? "" : bytes(activations),
      activations === null ? "" : bytes(activations)],
  ];
  $("memory-table").innerHTML = table(["", "formula", "lesson", "one rank alone (n = 1)", "this rank"], rows);
}

function activationWords({ most, chunks, layersOfStage, layer, recomputed, boundary, schedule }) {
  if (layer === null) return "describe the model by its layers to see them";
  const { bytes: each } = PRECISIONS[set.precision];
  const microbatches = `${most} microbatch${most > 1 ? "es" : ""}`;
  const layers = `${number(layersOfStage)} layers`;
  const a = `A = ${layerWords(each)} = ${bytes(layer)} for a layer`;
  const inputs = `inputs of b s h numbers, ${bytes(boundary)},`;
  const words = {
    nothing: `${microbatches} × ${layers} × A`,
    layers: `${microbatches} × ${layers} × ${inputs} + A`,
    stages: `${microbatches} × ${inputs} + ${layers} × A`,
  }[recomputed];
  const why = recomputed === set.recompute ? "" : `; ${SCHEDULES[schedule].title} has to keep them all`;
  return `${words}, with ${a}${chunks > 1 ? `, and ${chunks} stages on a rank` : ""}${why}`;
}

/** The formula of layerActivations() for what is set. */
function layerWords(each) {
  const { tensorRanks: t, contextRanks, experts, keepsAttention, sequenceParallel } = set;
  const tokens = contextRanks > 1 ? "b s/c" : "b s";
  const attention = keepsAttention ? ` + ${2 * each + 1} a s` : "";
  const inside = experts > 1 ? `(${4 * each} + ${8 * each} k) h${attention}` : `${12 * each} h${attention}`;
  const outside = experts > 1 ? `(${4 * each + 2} + ${3 * each} k) h` : `${4 * each + 2} h`;
  if (t === 1 && experts === 1) return `${tokens} (${16 * each + 2} h${attention})`;
  if (t === 1) return `${tokens} (${inside} + ${outside})`;
  return sequenceParallel ? `${tokens} (${inside} + ${outside}) / t` : `${tokens} ((${inside}) / t + ${outside})`;
}

/** Where the traffic of each stage of ZeRO is explained. */
const LESSONS = ["{{lesson data_parallel/train_naive.py}}", "{{lesson zero/train_zero1.py}}",
  "{{lesson zero/train_zero2.py}}", "{{lesson zero/train_zero3.py}}"];

function drawTime(result) {
  const { computing, waiting, idle, communication, makespan, apart, together, boundary, schedule, sent } = result;
  if (makespan !== null) {
    const hidden = Math.min(makespan, communication);
    const first = [["computing", computing], ["waiting", waiting], ["idle", idle]];
    const both = [...first, ["communication", communication]];
    const rest = [...first, ["communication", communication - hidden]];
    const lines = [["no overlap", both, apart], ["full overlap", rest, together]];
    $("times").innerHTML = lines.map(([name, parts, all]) =>
      `<div class="line"><span>${name}</span>${bar(parts, apart)}<b>${seconds(all)}</b></div>`).join("");
  } else $("times").innerHTML = `<p>${SCHEDULES[schedule].title} has a formula only for enough microbatches, m ≥ 2p, and backwards that take about `
    + "twice as long as forwards.</p>";
  const cost = "{{lesson comm/cost.py}}";
  const theory = "{{lesson pipeline_parallel/analysis/theory.py}}";
  const isAlone = set.dataRanks * set.contextRanks === 1;
  const rows = [
    ["computing", `m (f + i + w), with f = w = 2 × ${set.experts > 1 ? "parameters that a token uses" : "parameters"} / ${
      set.tensorRanks > 1 ? "(p t)" : "p"} × ${set.contextRanks > 1 ? "b s/c" : "b s"} / (operations a second), i = ${set.recompute === "nothing" ? "f" : "2 f: the forward again"}`,
      theory, seconds(computing)],
    ["bubble", set.pipelineRanks === 1 ? "no pipeline" : SCHEDULES[schedule].idle, theory,
      makespan === null || set.pipelineRanks === 1 ? "" : `${seconds(idle)}, ${percent(idle / makespan)} of ${seconds(makespan)}`],
    ...otherRows(result, cost),
    ["data parallel communication", isAlone ? "one rank alone" : collectiveWords(), cost, seconds(result.data)],
    ["bytes that a rank sends for it", isAlone ? "one rank alone" : TRAFFIC[set.stage],
      LESSONS[set.stage], bytes(sent)],
    ["bytes over a boundary of stages", boundaryWords(boundary), "{{lesson pipeline_parallel/messages.py}}",
      boundary === null || set.pipelineRanks === 1 ? "" : bytes(2 * set.microbatches * boundary)],
  ];
  $("time-table").innerHTML = table(["", "formula", "lesson", "in a step"], rows);
}

/** The rows of what tensor, expert and context ranks send to each other. */
function otherRows({ tensor, exchange, context, layer }, cost) {
  const a = `a layer's input: ${set.contextRanks > 1 ? "b s/c" : "b s"} h numbers`;
  const times = set.recompute === "nothing" ? "" : ", once more for the forward that is computed again";
  const unknown = "describe the model by its layers to see it";
  const rows = [
    [set.tensorRanks, "tensor parallel, waiting", `m layers/p × ${set.experts > 1 ? "(1 + k) 2" : "4"} all-reduces on t ranks of ${a}${times}`,
      `{{lesson tensor_parallel/traffic.py}}, ${cost}`, tensor],
    [set.expertRanks, "experts, waiting", `m layers/p × 4 all-to-alls on e ranks of k times ${a}${times}`,
      `{{lesson expert_parallel/train_moe.py}}, ${cost}`, exchange],
    [set.contextRanks, "context parallel communication", `m layers/p × 3 (c-1) messages of the keys and values of ${a}${times}`,
      "{{lesson context_parallel/traffic.py}}", context],
  ];
  return rows.filter(([ranks]) => ranks > 1).map(([, name, words, lesson, value]) =>
    [name, layer === null ? unknown : words, lesson, layer === null ? "" : seconds(value)]);
}

/** "reduce-scatter of G, all-gather of P": the collectives of a step, and the seconds of each. */
function collectiveWords() {
  const m = set.microbatches;
  const of = [["all-reduce of G"], ["reduce-scatter of G", "all-gather of P"], [`${m} × reduce-scatter of G`, "all-gather of P"],
    [`${2 * m} × all-gather of P`, `${m} × reduce-scatter of G`]][set.stage];
  const turns = set.stage ? "(n-1) (α + B/n β) + L α each, for its B bytes" : "2 (n-1) (α + G/n β) + L α";
  return `${of.join(", ")} on a ring: ${turns}`;
}

function boundaryWords(boundary) {
  if (set.pipelineRanks === 1) return "no pipeline";
  if (boundary === null) return "describe the model by its layers to see them";
  return `m × a microbatch's activations (${bytes(boundary)}) forward, and as many backward`;
}
