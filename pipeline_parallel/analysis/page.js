// Plays timelines that pipeline_parallel/analysis/simulate.py has computed. How long anything takes, and what waits
// for what, is in the data; this file only shows it.

const data = JSON.parse($("data").textContent);
const runs = data.runs.map(decode);

// What one can choose.
const state = {
  ranks: Number(linked.ranks || data.open.ranks),
  microbatches: Number(linked.microbatches || data.open.microbatches),
  message: linked.message ?? data.open.message,
  shown: linked.show?.split(",") ?? data.open.show,
  time: linked.time === undefined ? null : Number(linked.time),
};
if (!runs.some(inSetting)) Object.assign(state, data.open, { shown: data.open.show });

let charts = []; // one for each schedule on the page, see draw()

/** A run with cells that know their place: rows[rank][i] = {name, kind, microbatch, stage, chunk, start, ...}. */
function decode(run) {
  const rows = run.rows.map((row, rank) => row.map(([name, start, end, ...needs], i) => {
    const [, stage, kind, microbatch] = name.match(/(\d+)([FBIW])(\d+)/);
    const chunk = run.stages[rank].indexOf(Number(stage));
    return { name, kind, microbatch, stage, chunk, rank, i, start, end, needs };
  }));
  const cells = new Map(rows.flat().map((cell) => [cell.name, cell]));
  const perRank = Math.max(...run.stages.map((stages) => stages.length));
  const held = rows.map((row) => heldOver(row, perRank));
  return { ...run, rows, cells, held, peak: run.peak.map((count) => count / perRank) };
}

/** How many microbatches a rank holds, from when on; one in one of its n stages is 1/n of a microbatch. */
function heldOver(row, perRank) {
  let count = 0;
  return row.filter(({ kind }) => kind !== "I").map(({ kind, start, end }) => {
    count += kind === "F" ? 1 : -1;
    return { start: kind === "F" ? start : end, held: count / perRank };
  });
}

/** The last of `list`, which is in order, that has started by time t. */
function lastBy(list, t) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].start <= t) low = middle + 1;
    else high = middle;
  }
  return list[low - 1];
}

function inSetting(run) {
  return ["ranks", "microbatches", "message"].every((what) => run[what] === state[what]);
}

function offerAll() {
  const offerAny = (what, some, order) => {
    const values = [...new Set(some.map((run) => run[what]))].sort(order);
    offer(what, "radio", values.map((value) => [value, value]), (value) => value === state[what]);
  };
  const alike = runs.filter((run) => run.message === state.message);
  offerAny("message", runs, () => 0);
  offerAny("ranks", alike, (a, b) => a - b);
  offerAny("microbatches", alike.filter((run) => run.ranks === state.ranks), (a, b) => a - b);
  const here = runs.filter(inSetting);
  if (!here.some((run) => state.shown.includes(run.name))) state.shown = here.map((run) => run.name);
  offer("schedules", "checkbox", here.map((run) => [run.name, run.title]), (name) => state.shown.includes(name));
}

/** Go to the setting nearest to what is wanted: there are not runs of all of them. */
function settle(microbatches) {
  const off = (run) => 1e6 * Math.abs(run.ranks - state.ranks) + Math.abs(run.microbatches - microbatches);
  const nearest = runs.filter((run) => run.message === state.message).reduce((a, b) => (off(b) < off(a) ? b : a));
  state.ranks = nearest.ranks;
  state.microbatches = nearest.microbatches;
}

$("settings").addEventListener("change", ({ target }) => {
  const { name, value, checked } = target;
  const perRank = state.microbatches / state.ranks;
  if (name === "schedules") state.shown = state.shown.filter((each) => each !== value).concat(checked ? value : []);
  else state[name] = name === "message" ? value : Number(value);
  if (name === "ranks") settle(perRank * state.ranks);
  if (name === "message") {
    settle(state.microbatches);
    state.time = null; // what was measured is on another clock
  }
  const byKeyboard = target.matches(":focus-visible");
  if (name !== "schedules") offerAll();
  if (!state.shown.length) play(false);
  draw();
  // The choices are new elements: whoever walks through them by keyboard continues where they were.
  if (byKeyboard) document.querySelector(`[name="${name}"][value="${CSS.escape(value)}"]`)?.focus();
});

function draw() {
  silence();
  const shown = runs.filter((run) => inSetting(run) && state.shown.includes(run.name));
  horizon = Math.max(...shown.map((run) => run.makespan), 0) || 1;
  const cells = shown.flatMap((run) => run.rows.flat());
  moments = [...new Set(cells.flatMap(({ start, end }) => [start, end]))].sort((a, b) => a - b);
  const width = $("charts").clientWidth;
  place = width < 600 ? { width, left: 18, right: 60 } : { width, left: 52, right: 120 };
  const most = Math.max(...shown.flatMap((run) => run.peak), 1);
  $("charts").innerHTML = shown.length ? shown.map((run) => figure(run, most)).join("")
    : "<p>Choose a schedule to see it.</p>";
  charts = shown.map((run, i) => chartOf(run, $("charts").children[i], most));
  document.querySelector(".legend .later").hidden = !cells.some((cell) => cell.chunk > 0);
  drawAxis("held");
  seek(state.time ?? 0.4 * horizon);
  const { ranks, microbatches, message } = state;
  link({ ranks, microbatches, message, show: state.shown });
}

function sizes(run) {
  const cell = run.ranks > 4 ? 18 : 24;
  return { cell, memory: 9, row: cell + 9 + (run.ranks > 4 ? 3 : 6) };
}

function figure(run, most) {
  const { cell, memory, row } = sizes(run);
  const height = run.ranks * row;
  const narrow = place.left < 50;
  const parts = run.rows.map((cells, rank) => {
    const y = rank * row;
    return `<text x="0" y="${y + cell / 2 + 4}">${narrow ? rank : `rank ${rank}`}</text>`
      + `<rect class="lane" x="${x(0)}" y="${y}" width="${x(run.makespan) - x(0)}" height="${cell}"/>`
      + cells.map((each) => drawCell(each, y, cell)).join("")
      + `<path class="memory" d="${memoryPath(run, rank, y + cell + memory, (memory - 2) / most)}"/>`
      + `<rect class="gauge" x="${x(horizon) + 10}" y="${y + 4}" height="${cell - 8}"/>`
      + `<line class="peak" x1="${gauge(run.peak[rank], most)}" x2="${gauge(run.peak[rank], most)}"`
      + ` y1="${y + 2}" y2="${y + cell - 2}"/>`
      + `<text class="held small" x="${place.width}" y="${y + cell / 2 + 4}" text-anchor="end"></text>`;
  });
  const peak = Math.max(...run.peak);
  const facts = [["bubble", percent(run.bubble), "bubble"], ["makespan", number(run.makespan), "makespan"],
    ["peak activations", `${number(peak)} microbatch${peak > 1 ? "es" : ""}`, "peak-held"]];
  return `<figure data-run="${text(run.name)}">
    <figcaption><h2>${text(run.title)}</h2><p>${text(run.idea)}</p>
      <dl>${facts.map(([what, value, name]) =>
    `<div><dt>${what}</dt><dd class="${name}">${value}</dd></div>`).join("")}</dl></figcaption>
    <svg role="group" aria-label="${text(run.title)}, a row of cells for each rank" height="${height}"
      viewBox="0 0 ${place.width} ${height}">${parts.join("")}
      <line class="end" x1="${x(run.makespan)}" x2="${x(run.makespan)}" y2="${height}"/>
      <rect class="veil" y="0" height="${height}"/>
      <path class="way halo"/><path class="way"/><path class="frame"/>
      <line class="cursor" y2="${height}"/></svg></figure>`;
}

function drawCell({ name, kind, microbatch, chunk, rank, i, start, end }, y, height) {
  const width = x(end) - x(start);
  const gap = width > 4 ? 1 : 0;
  const box = `x="${x(start).toFixed(2)}" width="${(width - gap).toFixed(2)}"`;
  const band = kind === "B" ? `<rect class="band" ${box} y="${y + height * 0.8}" height="${height * 0.2}"/>` : "";
  const font = Math.min(12, (width - 2) / (0.65 * microbatch.length));
  const label = font < 8 ? "" : `<text x="${(x(start) + (width - gap) / 2).toFixed(2)}"`
    + ` y="${y + height / 2 + font / 3}" style="font-size: ${font.toFixed(1)}px">${microbatch}</text>`;
  return `<g class="cell ${kind} c${chunk}" data-action="${name}" role="img" tabindex="${rank + i ? -1 : 0}"`
    + ` aria-label="${name}"><rect ${box} y="${y}" height="${height}"/>${band}${label}</g>`;
}

/** What the rank holds over time, as a filled curve of steps on the line at `y`. */
function memoryPath(run, rank, y, unit) {
  const steps = run.held[rank].map(({ start, held }) => `H${x(start).toFixed(1)}V${(y - held * unit).toFixed(1)}`);
  return `M${x(0)} ${y}${steps.join("")}V${y}Z`;
}

const gauge = (held, most) => x(horizon) + 10 + held / most * (place.right - 10 - 28);

function chartOf(run, figure, most) {
  const all = (what) => [...figure.querySelectorAll(what)];
  const elements = new Map(all(".cell").map((element) => [element.dataset.action, element]));
  const [frame, veil, cursor] = [".frame", ".veil", ".cursor"].map((what) => figure.querySelector(what));
  const [ways, gauges, held] = [".way", ".gauge", "text.held"].map(all);
  return { run, figure, most, elements, frame, veil, cursor, ways, gauges, held,
    running: run.rows.map(() => null) };
}

const clock = (time) => `${time.toFixed(horizon < 1 ? 4 : 1)} of ${number(horizon)}`;
const pace = () => 4 * (charts[0]?.run.forward ?? 1);
const showMoment = () => charts.forEach(showTime);

function showTime(chart) {
  const at = x(state.time);
  chart.cursor.setAttribute("x1", at);
  chart.cursor.setAttribute("x2", at);
  chart.veil.setAttribute("x", at);
  chart.veil.setAttribute("width", Math.max(0, x(horizon) + 1 - at));
  chart.run.rows.forEach((row, rank) => {
    const last = lastBy(row, state.time);
    const running = last && state.time < last.end ? last.name : null;
    if (running !== chart.running[rank]) {
      chart.elements.get(chart.running[rank])?.classList.remove("running");
      chart.elements.get(running)?.classList.add("running");
      chart.running[rank] = running;
    }
    const held = lastBy(chart.run.held[rank], state.time)?.held ?? 0;
    chart.gauges[rank].setAttribute("width", gauge(held, chart.most) - gauge(0, chart.most));
    chart.held[rank].textContent = number(held);
  });
}

function start() {
  offerAll();
  draw();
}
