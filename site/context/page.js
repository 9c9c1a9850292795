// What can be chosen, and what follows from it. timeline.js, moment.js and tables.js show it.

const RANKS = [2, 3, 4, 5, 6, 7, 8];
const MASKS = { causal: "causal", none: "none: all pairs attend" };
const ITEMSIZES = { 2: "16 bits", 4: "32 bits" };
const state = {
  ranks: 4, cut: "contiguous", mask: "causal", itemsize: 2, length: 32768, batch: 1, heads: 32, kvHeads: 8, headWidth: 128,
  compute: 20e-3, alpha: 20e-6, rate: 400, // seconds, seconds, Gbit/s
  time: linked.time === undefined ? null : Number(linked.time),
};
const CHOICES = { ranks: RANKS.map((n) => [n, n]), cut: Object.entries(CUTS).map(([name, { title }]) => [name, title]),
  mask: Object.entries(MASKS), itemsize: Object.entries(ITEMSIZES) };
for (const [name, options] of Object.entries(CHOICES)) {
  if (options.some(([value]) => String(value) === linked[name])) choose(name, linked[name]);
}

function choose(name, value) {
  state[name] = name === "ranks" || name === "itemsize" ? Number(value) : value;
}

const whole = (label, limits) => ({ box: "sizes", label, limits, isWhole: true });
const fields = fieldsOf({
  length: whole("tokens of a sequence", [16, 1e8]), // no rank is without tokens
  batch: whole("batch", [1, 1e6]),
  heads: whole("query heads", [1, 1e4]),
  kvHeads: whole("heads of keys and values", [1, 1e4]),
  headWidth: whole("width of a head", [1, 1e5]),
  compute: { box: "speeds", label: "causal attention on one rank", units: [["µs", 1e-6], ["ms", 1e-3], ["s", 1]],
    limits: [1e-6, 1e5], say: seconds },
  alpha: { box: "speeds", label: "latency α", units: [["µs", 1e-6]], limits: [0, 10] },
  rate: { box: "speeds", label: "rate 1/β", units: [["Gbit/s", 1]], limits: [1e-3, 1e5] },
}, state);
if (state.heads % state.kvHeads) state.kvHeads = state.heads;

let shown; // all that follows from the settings

/** What follows from the settings. The time of the page is that of the slower cut, so that the two can be compared. */
function results(set) {
  const { ranks: n, length, batch, kvHeads, headWidth, itemsize, alpha, rate } = set;
  const isCausal = set.mask === "causal";
  const link = { alpha, beta: 8e-9 / rate };
  const perPair = secondsPerPair(set.compute, length);
  const tokenBytes = 2 * batch * kvHeads * headWidth * itemsize;
  const cut = CUTS[set.cut].of(length, n);
  const lengths = ranksOf(n).map((rank) => lengthOf(cut, rank));
  const timelines = Object.fromEntries(Object.entries(CUTS).map(([name, { of }]) =>
    [name, timelineOf(of(length, n), isCausal, perPair, tokenBytes, link)]));
  const blockBytes = Math.max(...lengths) * tokenBytes;
  const formula = ringSeconds(stepPairs(cut, isCausal), perPair, blockBytes, link);
  const pairs = balancedPairs(cut, isCausal);
  const balanced = pairs * perPair; // seconds of the forward
  return { n, isCausal, link, cut, lengths, blockBytes, formula, balanced, timeline: timelines[set.cut], timelines,
    pairs: n * pairs, techniques: techniques(set, lengths, formula, balanced, link) };
}

const clock = (time) => `${seconds(time)} of ${seconds(horizon)}`;
const pace = () => horizon / 12;
const silence = () => {};

function draw() {
  shown = results(state);
  const { n, timeline, timelines, pairs, blockBytes, link: { alpha, beta }, balanced } = shown;
  horizon = Math.max(...Object.values(timelines).map(({ makespan }) => makespan));
  const times = [...timeline.rows.flat().flatMap(({ begin, computed, end }) => [begin, computed, end]),
    ...timeline.messages.flatMap(({ leaves, arrives }) => [leaves, arrives])];
  moments = [...new Set([0, ...times])].sort((a, b) => a - b)
    .filter((time, i, all) => !i || time - all[i - 1] > horizon * 1e-9); // equal but for rounding
  const width = $("charts").clientWidth;
  place = width < 600 ? { width, left: 20, right: 14 } : { width, left: 66, right: 20 };
  $("given").innerHTML = `One rank alone would compute <b>${seconds(n * balanced)}</b>, for ${inUnit(pairs,
    [["trillion", 1e12], ["billion", 1e9], ["million", 1e6], ["", 1]])} pairs of a query and a key in each head. A message`
    + ` has the keys and values of a rank's tokens, ${bytes(blockBytes)}, and takes α + b β = <b>${seconds(alpha)}</b> +`
    + ` <b>${seconds(blockBytes * beta)}</b>.`;
  $("rank-colours").innerHTML = `${ranksOf(n).map((rank) => `<i class="rank${rank}"></i>`).join("")}ranks 0 to ${n - 1}:`
    + " who computes";
  drawTimeline();
  drawAxis("", (time) => (time ? seconds(time) : "0"));
  drawMatrix();
  drawRing();
  drawSteps();
  drawTechniques();
  seek(state.time ?? 0.3 * timeline.makespan);
  const { time, ...settings } = state;
  link(settings);
}

function showMoment() {
  showTimeline();
  showMatrix();
  showRing();
  showStates();
}

function offerAll() {
  for (const [name, options] of Object.entries(CHOICES)) {
    offer(name, "radio", options, (value) => String(value) === String(state[name]));
  }
}

$("settings").addEventListener("input", ({ target: { name, value } }) => {
  if (CHOICES[name]) choose(name, value);
  else fields.read();
  const isWrong = state.heads % state.kvHeads !== 0;
  if (isWrong) {
    $("kvHeads").setAttribute("aria-invalid", true);
    $("complaint").textContent = "heads of keys and values: give a number that divides the number of query heads.";
    return;
  }
  const share = state.time / horizon; // the new times may be much longer or shorter
  play(false);
  state.time = null;
  draw();
  seek(share * horizon);
});

function start() {
  offerAll();
  fields.put();
  draw();
}
