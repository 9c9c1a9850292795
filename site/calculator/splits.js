// All ways to divide the same ranks between data parallelism and a pipeline, with the same texts in a step.

/** The settings of each way: n p ranks as before, and as many microbatches more as there are data ranks less. */
function splitsOf(given) {
  const ranks = given.dataRanks * given.pipelineRanks;
  const microbatches = given.microbatches * given.dataRanks; // in a step of all ranks
  const pipelines = Array.from({ length: Math.min(ranks, 64) }, (_, i) => i + 1).filter((p) => ranks % p === 0)
    .filter((p) => given.model !== "layers" || given.layers % (p === 1 ? 1 : p * SCHEDULES[given.schedule].chunks) === 0)
    .filter((p) => microbatches % (ranks / p) === 0)
    .filter((p) => ranks / p * given.contextRanks % given.expertRanks === 0);
  return pipelines.map((p) => ({ pipelineRanks: p, dataRanks: ranks / p, microbatches: microbatches * p / ranks }));
}

function drawSplits() {
  const other = set.recompute === "nothing" ? "layers" : set.recompute;
  const recomputes = set.model === "layers" ? ["nothing", other] : [set.recompute];
  const rows = splitsOf(set).flatMap((split) => recomputes.map((recompute) => {
    const result = results({ ...set, ...split, recompute });
    return [0, 1, 2, 3].map((stage) => outcomeOf({ ...split, recompute, stage }, result));
  }));
  $("splits").innerHTML = table(["", "no ZeRO", "ZeRO 1", "ZeRO 2", "ZeRO 3"],
    rows.map((row) => [nameOf(row[0]), ...row.map(splitButton)]));
  const all = rows.flat();
  const fitting = all.filter(({ fits }) => fits);
  const fastest = fitting.filter(({ step }) => step !== null).sort((a, b) => a.step - b.step)[0];
  const others = set.tensorRanks * set.contextRanks;
  const ranks = set.dataRanks * set.pipelineRanks * others;
  if (!all.length) {
    $("splits").innerHTML = "";
    $("splits-words").textContent = `No number of stages on ${ranks} ranks divides both the layers and the`
      + " microbatches of a step evenly.";
    return;
  }
  $("splits-words").innerHTML = `${ranks} ranks can be p pipeline stages of n data parallel ranks each`
    + `${others > 1 ? ", with t tensor and c context ranks as above" : ""}. With the same texts`
    + ` in a step, <b>${fitting.length} of ${all.length} ways fit</b> into ${bytes(set.capacity)} on each rank. `
    + (fastest ? `The fastest of them is ${nameOf(fastest)}, ${zeroOf(fastest)}: ${seconds(fastest.step)} a step, if`
      + " communication overlaps with computing as far as it can, as in all times here. " : "")
    + "Choose a way to see its numbers above and below.";
}

/** What a way needs, and how long its step takes if communication overlaps as far as it can. */
function outcomeOf(way, result) {
  const needed = total(result.stages[way.stage], result);
  const step = result.makespan === null ? null : Math.max(result.makespan, wayCommunication(way, result));
  return { way, needed, step, fits: needed <= set.capacity };
}

const zeroOf = ({ way }) => (way.stage ? `ZeRO ${way.stage}` : "no ZeRO");
const nameOf = ({ way }) => `p = ${way.pipelineRanks}, n = ${way.dataRanks}, m = ${way.microbatches}`
  + `${way.recompute === "nothing" ? "" : `, ${RECOMPUTED[way.recompute]}`}`;

function splitButton(outcome) {
  const { way, needed, step, fits } = outcome;
  const isChosen = Object.entries(way).every(([name, value]) => set[name] === value);
  const time = step === null ? "no formula" : seconds(step);
  return `<button type="button" class="${fits ? "" : "over"}" aria-pressed="${isChosen}" data-way='${JSON.stringify(way)}'`
    + ` aria-label="${nameOf(outcome)}, ${zeroOf(outcome)}: ${bytes(needed)}, ${fits ? `fits, ${time} a step` : "does not fit"}">`
    + `<b>${bytes(needed)}</b><span>${fits ? time : "too much"}</span></button>`;
}

const wayCommunication = (way, { ofDense, ofExperts, context }) => context
  + communicationOf({ ...set, ...way }, ofDense, ofExperts, { alpha: set.alpha, beta: 8e-9 / set.rate }).seconds;

$("splits").addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (!button) return;
  const { way } = button.dataset;
  Object.assign(set, JSON.parse(way));
  showSet();
  draw();
  document.querySelector(`#splits [data-way='${way}']`)?.focus();
});
