// Shows the timelines of algorithms.js: ranks on a circle with messages between them, and the same messages over time.

const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const RANKS = [2, 3, 4, 6, 8, 12, 16];
const ITEMSIZE = 4; // float32
const LIMITS = { size: [4, 1e12], alpha: [0, 10], rate: [1e-3, 1e5] };
const state = {
  ranks: RANKS.includes(Number(chosen.ranks)) ? Number(chosen.ranks) : 8,
  size: typed(chosen.size, LIMITS.size, 1e6), // bytes
  alpha: typed(chosen.alpha, LIMITS.alpha, 50e-6), // seconds
  rate: typed(chosen.rate, LIMITS.rate, 10), // Gbit/s
  shown: inOrder(chosen.show?.split(",") ?? ["tree", "ring", "halving_doubling"]),
  time: chosen.time === undefined ? null : Number(chosen.time),
};

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
  const width = widthBefore = $("charts").clientWidth;
  const isWide = width >= 760;
  place = { width, left: isWide ? 350 : 52, right: isWide ? 28 : 18, isWide };
  $("charts").innerHTML = timelines.map(figure).join("") || "<p>Choose an algorithm to see it.</p>";
  charts = timelines.map((timeline, i) => chartOf(timeline, $("charts").children[i]));
  drawAxis("", (time) => (time ? seconds(time) : "0"));
  drawSizes();
  seek(state.time ?? 0.35 * horizon);
  const { ranks, size, alpha, rate, shown } = state;
  history.replaceState(null, "", `#${new URLSearchParams({ ranks, size, alpha, rate, show: shown })}`);
}

/** Where things are in a chart: the circle, and the lines of the ranks. */
function shapeOf(n) {
  const side = place.isWide ? 300 : Math.min(300, place.width);
  const row = n > 8 ? 20 : 30;
  const top = place.isWide ? Math.max(14, (side - row * (n - 1)) / 2) : side + 18;
  const center = { x: place.isWide ? side / 2 : place.width / 2, y: side / 2 };
  const node = (rank) => {
    const angle = 2 * Math.PI * rank / n - Math.PI / 2;
    return { x: center.x + (side / 2 - 30) * Math.cos(angle), y: center.y + (side / 2 - 24) * Math.sin(angle) };
  };
  const height = Math.max(place.isWide ? side : 0, top + row * (n - 1) + 14);
  return { height, node, line: (rank) => top + rank * row };
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
      <g class="chords"></g><g class="nodes"></g><g class="dots"></g>
      <line class="cursor" y1="${shape.line(0) - 12}" y2="${shape.line(n - 1) + 12}"/></svg>
    <p class="words"></p></figure>`;
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
    ["its messages", most.messages, "messages", ""],
    ["with headers", seconds(byFormula + headerSeconds(n, state.alpha)), "with-headers", ""],
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
  const [nodes, chords, dots, veil, cursor, words] =
    [".nodes", ".chords", ".dots", ".veil", ".cursor", ".words"].map(find);
  return { timeline, borders: bordersOf(timeline), shape: shapeOf(timeline.n), nodes, chords, dots, veil, cursor, words };
}

const showMoment = () => charts.forEach(showTime);

function showTime({ timeline, borders, shape, nodes, chords, dots, veil, cursor, words }) {
  const at = x(state.time);
  cursor.setAttribute("x1", at);
  cursor.setAttribute("x2", at);
  veil.setAttribute("x", at);
  veil.setAttribute("width", Math.max(0, x(horizon) + 1 - at));
  const round = timeline.rounds.findIndex(({ end }) => state.time < end);
  const flying = round < 0 ? [] : timeline.rounds[round].messages.filter(({ leaves }) => leaves <= state.time)
    .filter(({ arrives }) => state.time < arrives);
  chords.innerHTML = flying.map(({ from, to, adds }) => {
    const [a, b] = [from, to].map((rank) => shape.node(rank));
    return `<path class="chord ${adds ? "partial" : "complete"}" d="M${a.x} ${a.y}L${b.x} ${b.y}"/>`;
  }).join("");
  dots.innerHTML = flying.map((message) => dot(message, timeline, shape)).join("");
  nodes.innerHTML = contentsAt(timeline, borders, state.time).map((row, rank) =>
    node(row, rank, borders, shape, timeline.n)).join("");
  const count = timeline.rounds.length;
  words.innerHTML = round < 0 ? "<b>Done.</b> Every rank has the sum of all."
    : `<b>Round ${round + 1} of ${count}.</b> ${timeline.rounds[round].words}`;
}

function dot({ from, to, leaves, arrives, bytes: size, adds }, { numel: all }, { node: at }) {
  const [a, b, way] = [at(from), at(to), (state.time - leaves) / (arrives - leaves)];
  const radius = 3 + 7 * Math.sqrt(size / (all * ITEMSIZE));
  return `<circle class="dot ${adds ? "partial" : "complete"}" r="${radius.toFixed(1)}"`
    + ` cx="${(a.x + way * (b.x - a.x)).toFixed(1)}" cy="${(a.y + way * (b.y - a.y)).toFixed(1)}"/>`;
}

/** A rank on the circle: its number, and its tensor. A part is filled as far as it has the ranks' values. */
function node(row, rank, borders, shape, n) {
  const { x: middle, y: center } = shape.node(rank);
  const [width, height] = [n > 12 ? 38 : 48, 14];
  const y = center - height / 2;
  const left = middle - width / 2;
  const scale = (element) => left + width * element / borders.at(-1);
  const parts = row.map((set, i) => {
    const count = ranksOf(n).filter((each) => Math.floor(set / 2 ** each) % 2).length;
    const [from, to, full] = [scale(borders[i]), scale(borders[i + 1]), height * count / n];
    return `<rect class="${count === n ? "complete" : "partial"}" data-ranks="${count}" x="${from.toFixed(2)}"`
      + ` width="${(to - from).toFixed(2)}" y="${(y + height - full).toFixed(2)}" height="${full.toFixed(2)}"/>`;
  });
  return `<text class="small" x="${middle}" y="${y - 4}" text-anchor="middle">${rank}</text>`
    + `<rect class="buffer" x="${left}" y="${y}" width="${width}" height="${height}"/>${parts.join("")}`;
}
