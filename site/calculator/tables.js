// The results in words, bars and tables.

const KINDS = ["parameters", "gradients", "optimizer", "activations"];

function draw() {
  const isDetailed = set.model === "layers";
  $("of-layers").hidden = !isDetailed;
  $("of-parameters").hidden = isDetailed;
  $("options").hidden = !isDetailed;
  $("heads").closest("label").hidden = !set.keepsAttention;
  $("schedule").hidden = set.pipelineRanks === 1;
  const result = results(set);
  drawSummary(result);
  drawMemory(result);
  drawTime(result);
  history.replaceState(null, "", `#${new URLSearchParams(set)}`);
}

const total = (held, { activations }) => held.parameters + held.gradients + held.optimizer + (activations ?? 0);
const count = (value) => (value < 1e6 ? Number(value.toPrecision(4)).toLocaleString("en")
  : inUnit(value, [["trillion", 1e12], ["billion", 1e9], ["million", 1e6]]));

function drawSummary(result) {
  const needed = total(result.stages[set.stage], result);
  const needs = needed <= set.capacity ? `needs <b>${bytes(needed)}</b> of its ${bytes(set.capacity)}`
    : `needs <b>${bytes(needed)}</b>, and has only ${bytes(set.capacity)}`;
  const step = result.makespan === null ? "There is no formula for the time of this schedule with these numbers."
    : `A step takes ${seconds(result.together)} if all communication is hidden, and ${seconds(result.apart)} if none is:`
      + ` ${count(result.tokens / result.together)} or ${count(result.tokens / result.apart)} tokens a second.`;
  $("summary").innerHTML = `<b>${count(result.parameters)} parameters on ${set.dataRanks * set.pipelineRanks} ranks.</b>`
    + ` A rank ${needs}. ${step}`;
}

/** A bar of parts, each [kind, value]; the full width stands for `most`. */
function bar(parts, most) {
  const pieces = parts.map(([kind, value]) => `<i class="${kind}" style="width: ${(100 * value / most).toFixed(3)}%"></i>`);
  return `<span class="bar" aria-hidden="true">${pieces.join("")}</span>`;
}

function drawMemory(result) {
  const { stages, activations, full } = result;
  const most = Math.max(set.capacity, total(stages[0], result));
  $("bars").innerHTML = stages.map((held, stage) => {
    const parts = KINDS.map((kind) => [kind, kind === "activations" ? activations ?? 0 : held[kind]]);
    return `<div class="line${stage === set.stage ? " chosen" : ""}"><span>${stage ? `ZeRO ${stage}` : "no ZeRO"}</span>`
      + `${bar(parts, most)}<b>${bytes(total(held, result))}</b></div>`;
  }).join("") + `<div class="line limit"><span>a rank has</span>${bar([["limit", set.capacity]], most)}<b>${bytes(set.capacity)}</b></div>`;

  const chosen = stages[set.stage];
  const shard = (least) => (set.stage >= least ? " / n" : "");
  const { bytes: each, copy } = PRECISIONS[set.precision];
  const numbers = OPTIMIZERS[set.optimizer][1];
  const rows = [
    ["parameters", `P${shard(3)}, with P = ${each} bytes × parameters / p`, bytes(full.parameters), bytes(chosen.parameters)],
    ["gradients", `G${shard(2)}, with G = ${each} bytes × parameters / p`, bytes(full.gradients), bytes(chosen.gradients)],
    ["optimizer state", `O${shard(1)}, with O = ${copy + 4 * numbers} bytes × parameters / p`,
      bytes(full.optimizer), bytes(chosen.optimizer)],
    ["activations", activationWords(result), activations === null ? "" : bytes(activations),
      activations === null ? "" : bytes(activations)],
  ];
  $("memory-table").innerHTML = table(["", "formula", "one rank alone (n = 1)", "this rank"], rows);
}

function activationWords({ most, chunks, saves, ofStage, boundary, schedule }) {
  if (ofStage === null) return "describe the model by its layers to see them";
  const what = `${bytes(ofStage)} for a microbatch of ${chunks > 1 ? "one of a rank's 2 stages" : "a stage"}`;
  if (saves) return `${most} × the input of a stage, ${bytes(boundary)}, and ${what}, recomputed`;
  const vain = set.recompute ? `; ${SCHEDULES[schedule].title} has to keep them` : "";
  return `${most} × ${what}${vain}`;
}

function drawTime(result) {
  const { computing, idle, communication, makespan, apart, together, boundary, schedule, sent } = result;
  if (makespan !== null) {
    const hidden = Math.min(makespan, communication);
    const both = [["computing", computing], ["idle", idle], ["communication", communication]];
    const rest = [["computing", computing], ["idle", idle], ["communication", communication - hidden]];
    const lines = [["nothing hidden", both, apart], ["all hidden", rest, together]];
    $("times").innerHTML = lines.map(([name, parts, all]) =>
      `<div class="line"><span>${name}</span>${bar(parts, apart)}<b>${seconds(all)}</b></div>`).join("");
  } else $("times").innerHTML = "<p>ZB-V has a formula only for enough microbatches: m ≥ 2p-1, without recomputation.</p>";
  const rows = [
    ["computing", "m (f + i + w), with f = 2 × parameters / p × b s / (operations a second)", seconds(computing)],
    ["bubble", set.pipelineRanks === 1 ? "no pipeline" : SCHEDULES[schedule].idle,
      makespan === null ? "" : `${seconds(idle)}, ${percent(idle / makespan)} of ${seconds(makespan)}`],
    ["data parallel communication", "rings: (n-1) (α + B/n β), twice that for an all-reduce; L α for headers",
      seconds(communication)],
    ["bytes that a rank sends for it", set.dataRanks === 1 ? "one rank alone" : TRAFFIC[set.stage], bytes(sent)],
    ["bytes over a boundary of stages", boundaryWords(boundary),
      boundary === null || set.pipelineRanks === 1 ? "" : bytes(2 * set.microbatches * boundary)],
  ];
  $("time-table").innerHTML = table(["", "formula", "in a step"], rows);
}

function boundaryWords(boundary) {
  if (set.pipelineRanks === 1) return "no pipeline";
  if (boundary === null) return "describe the model by its layers to see them";
  return `m × b s h numbers (${bytes(boundary)}) forward, and as many backward`;
}

function table(heads, rows) {
  const head = heads.map((name) => (name ? `<th scope="col">${name}</th>` : "<td></td>")).join("");
  const body = rows.map(([name, ...cells]) =>
    `<tr><th scope="row">${name}</th>${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`);
  return `<thead><tr>${head}</tr></thead><tbody>${body.join("")}</tbody>`;
}
