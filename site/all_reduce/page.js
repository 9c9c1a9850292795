// Shows the timelines of algorithms.js: ranks on a circle with messages between them, and the same messages over time.

const RANKS = [2, 3, 4, 6, 8, 12, 16];
const ITEMSIZE = 4; // float32
const state = {
  ranks: RANKS.includes(Number(linked.ranks)) ? Number(linked.ranks) : 8,
  size: 1e6, // bytes
  alpha: 50e-6, // seconds
  rate: 10, // Gbit/s
  shown: inOrder(linked.show?.split(",") ?? ["tree", "ring", "halving_doubling"]),
  time: linked.time === undefined ? null : Number(linked.time),
};
const fields = fieldsOf({
  size: { box: "speeds", label: "tensor B", units: [["kB", 1e3], ["MB", 1e6], ["GB", 1e9]], limits: [4, 1e12], say: bytes },
  alpha: { box: "speeds", label: "latency α", units: [["µs", 1e-6]], limits: [0, 10] },
  rate: { box: "speeds", label: "rate 1/β", units: [["Gbit/s", 1]], limits: [1e-3, 1e5] },
}, state);

function inOrder(names) {
  return Object.keys(ALGORITHMS).filter((name) => names.includes(name));
}

const beta = () => 8e-9 / state.rate;
const numel = () => Math.round(state.size / ITEMSIZE);
let charts = []; // one for each algorithm on the page, see draw()

const clock = (time) => `${seconds(time)} of ${seconds(horizon)}`;
const pace = () => horizon / 10;
const silence = () => {};

function draw() {
  const timelines = state.shown.map((name) =>
    timelineOf(name, state.ranks, numel(), ITEMSIZE, state.alpha, beta()));
  horizon = Math.max(...timelines.map((timeline) => timeline.seconds), 0) || 1;
  moments = [...new Set([0, ...timelines.flatMap(({ rounds }) => rounds.map(({ end }) => end))])].sort((a, b) => a - b);
  const width = $("charts").clientWidth;
  const isWide = width >= 760;
  place = { width, left: isWide ? 390 : 52, right: isWide ? 28 : 18, isWide };
  $("charts").innerHTML = timelines.map(figure).join("") || "<p>Choose an algorithm to see it.</p>";
  charts = timelines.map((timeline, i) => chartOf(timeline, $("charts").children[i]));
  drawAxis("", (time) => (time ? seconds(time) : "0"));
  $("given").innerHTML = `A message of the full tensor takes α + B β = <b>${seconds(state.alpha)}</b> + `
    + `<b>${seconds(state.size * beta())}</b>; n = ${state.ranks}, so L = ${log2Up(state.ranks)} and `
    + `l = ${log2Down(state.ranks)}.`;
  drawSizes();
  seek(state.time ?? 0.35 * horizon);
  const { ranks, size, alpha, rate, shown } = state;
  link({ ranks, size, alpha, rate, show: shown });
}

/** Where things are in a chart: the circle, and the lines of the ranks. */
function shapeOf(n) {
  const side = place.isWide ? 340 : Math.min(340, place.width);
  const row = n > 8 ? 20 : 30;
  const top = place.isWide ? Math.max(14, (side - row * (n - 1)) / 2) : side + 18;
  const center = { x: place.isWide ? side / 2 : place.width / 2, y: side / 2 };
  const width = n > 12 ? 36 : n > 8 ? 42 : 52; // of a rank's tensor
  const node = (rank) => {
    const angle = 2 * Math.PI * rank / n - Math.PI / 2;
    return { x: center.x + (side / 2 - width / 2 - 18) * Math.cos(angle), y: center.y + (side / 2 - 26) * Math.sin(angle) };
  };
  const height = Math.max(place.isWide ? side : 0, top + row * (n - 1) + 14);
  return { height, width, center, node, line: (rank) => top + rank * row };
}

function figure(timeline) {
  const { name, n, rounds } = timeline;
  const { title, idea } = ALGORITHMS[name];
  const shape = shapeOf(n);
  const end = x(timeline.seconds);
  const lines = ranksOf(n).map((rank) => `<text x="${place.left - 8}" y="${shape.line(rank) + 4}" text-anchor="end">`
    + `${place.isWide ? "rank " : ""}${rank}</text>`
    + `<line class="lane" x1="${x(0)}" x2="${end}" y1="${shape.line(rank)}" y2="${shape.line(rank)}"/>`);
  const borders = rounds.map((round) =>
    `<line class="round" x1="${x(round.end)}" x2="${x(round.end)}" y1="${shape.line(0) - 8}" y2="${shape.line(n - 1) + 8}"/>`);
  const tracks = rounds.flatMap(({ messages }) => messages.map((message) => track(message, shape)));
  return `<figure data-run="${name}">
    <figcaption><h2>${title}</h2><p>${idea}</p>${facts(timeline)}</figcaption>
    <svg role="img" aria-label="${title}: ${n} ranks on a circle with the messages in flight, and all messages over time"
      height="${shape.height}" viewBox="0 0 ${place.width} ${shape.height}">
      ${lines.join("")}${borders.join("")}${tracks.join("")}
      <rect class="veil" y="${shape.line(0) - 12}" height="${shape.line(n - 1) - shape.line(0) + 24}"/>
      <g class="chords"></g><g class="nodes"></g><g class="parcels"></g>
      <line class="cursor" y1="${shape.line(0) - 12}" y2="${shape.line(n - 1) + 12}"/></svg>
    <p class="words"></p>
    <details ${listed.includes(name) ? "open" : ""}><summary>What is in the messages of this round</summary>
      <div class="scroll" tabindex="0"><table aria-label="Messages of this round of ${title}"></table></div></details></figure>`;
}

/** What is counted in the messages that are shown, and what the formulas say. */
function facts({ name, n, seconds: total, sent }) {
  const { formula, seconds: predicted, sent: share } = ALGORITHMS[name];
  const most = sent.reduce((a, b) => (b.bytes > a.bytes ? b : a));
  const [words, times] = share(n);
  const byFormula = predicted(n, state.alpha, numel() * ITEMSIZE * beta());
  const rows = [
    ["time", seconds(total), "time", `${formula(n)} = <span class="time-formula">${seconds(byFormula)}</span>`],
    ["most bytes of a rank", bytes(most.bytes), "bytes",
      `${words} = <span class="bytes-formula">${bytes(times * numel() * ITEMSIZE)}</span>`],
    ["messages of that rank", most.messages, "messages", ""],
    ["time with headers", seconds(byFormula + headerSeconds(n, state.alpha)), "with-headers", ""],
  ];
  return `<dl>${rows.map(([what, value, kind, more]) =>
    `<div><dt>${what}</dt><dd class="${kind}">${value}</dd><dd class="formula">${more}</dd></div>`).join("")}</dl>`;
}

/** A message over time: a bar on its sender's line while its bytes leave, and a line to where it arrives. */
function track({ from, to, leaves, arrives, alpha, adds }, { line }) {
  const kind = adds ? "partial" : "complete";
  const bar = `<rect class="${kind}" x="${x(leaves).toFixed(2)}" y="${line(from) - 3}" height="6"`
    + ` width="${Math.max(1, x(arrives - alpha) - x(leaves) - 0.5).toFixed(2)}"/>`;
  return `${bar}<path class="way ${kind}" d="M${x(leaves).toFixed(2)} ${line(from)}L${x(arrives).toFixed(2)} ${line(to)}"/>`;
}

function chartOf(timeline, element) {
  const find = (what) => element.querySelector(what);
  const [nodes, chords, parcels, veil, cursor, words, list] =
    [".nodes", ".chords", ".parcels", ".veil", ".cursor", ".words", "details"].map(find);
  return { timeline, borders: bordersOf(timeline), shape: shapeOf(timeline.n),
    nodes, chords, parcels, veil, cursor, words, list };
}

const showMoment = () => charts.forEach(showTime);

function showTime(chart) {
  const { timeline, borders, shape, nodes, chords, parcels, veil, cursor, words } = chart;
  const at = x(state.time);
  cursor.setAttribute("x1", at);
  cursor.setAttribute("x2", at);
  veil.setAttribute("x", at);
  veil.setAttribute("width", Math.max(0, x(horizon) + 1 - at));
  const now = timeline.rounds.findIndex(({ end }) => state.time < end);
  const round = timeline.rounds[now];
  const flying = (round?.messages ?? []).filter(({ leaves, arrives }) => leaves <= state.time && state.time < arrives);
  chords.innerHTML = flying.map(({ from, to, adds }) => {
    const [a, b] = [from, to].map((rank) => shape.node(rank));
    return `<path class="chord ${adds ? "partial" : "complete"}" d="M${a.x} ${a.y}L${b.x} ${b.y}"/>`;
  }).join("");
  parcels.innerHTML = flying.map((message) => parcel(message, round, timeline, borders, shape)).join("");
  nodes.innerHTML = contentsAt(timeline, borders, state.time).map((row, rank) =>
    node(row, rank, borders, shape, timeline.n)).join("");
  words.innerHTML = round ? `<b>Round ${now + 1} of ${timeline.rounds.length}.</b> ${round.words} <span>${roundWords(round)}</span>`
    : "<b>Done.</b> Every rank has the sum of all.";
  listMessages(chart, now);
}

/** A rank on the circle: its number, and its tensor. A part is filled as far as it has the ranks' values. */
function node(row, rank, borders, { node: at, width, center }, n) {
  const { x: middle, y } = at(rank);
  const parts = row.map((set, i) => ({ begin: borders[i], end: borders[i + 1], count: countOf(set, n) }));
  const side = Math.sign(Math.round(middle - center.x));
  const [along, down] = side ? [middle + side * (width / 2 + 9), y + 4] : [middle, y < center.y ? y - 12 : y + 20];
  return `<text class="small" x="${along.toFixed(1)}" y="${down.toFixed(1)}" text-anchor="middle">${rank}</text>`
    + tensor(middle, y, width, 16, parts, borders.at(-1), n);
}
