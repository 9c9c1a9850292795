// The lines of "which is fastest at which size", and the settings that all of the page follows.

/** Draw the formulas' seconds over the tensor's size, both axes in powers of ten, and say which is fastest. */
function drawSizes() {
  const [width, height, left, bottom] = [$("charts").clientWidth, 280, 52, 24];
  const right = 150;
  const sizes = Array.from({ length: 57 }, (_, i) => 10 ** (2 + i / 8)); // 100 bytes to 1 GB
  const at = (name, size) => ALGORITHMS[name].seconds(state.ranks, state.alpha, size * beta());
  const names = Object.keys(ALGORITHMS);
  const all = names.flatMap((name) => sizes.map((size) => at(name, size)));
  const [low, high] = [Math.log10(Math.min(...all)) - 0.1, Math.log10(Math.max(...all))];
  const across = (size) => left + (Math.log10(size) - 2) / 7 * (width - left - right);
  const up = (time) => 8 + (high - Math.log10(time)) / (high - low) * (height - bottom - 8);
  const powers = Array.from({ length: 20 }, (_, i) => i - 10).filter((power) => power >= low && power <= high);
  const grid = powers.map((power) => `<line class="grid" x1="${left}" x2="${width - right}" y1="${up(10 ** power)}"`
    + ` y2="${up(10 ** power)}"/><text class="small" x="${left - 6}" y="${up(10 ** power) + 4}" text-anchor="end">`
    + `${seconds(10 ** power)}</text>`);
  const ticks = [1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9].filter((_, i) => width > 600 || i % 2);
  const labels = ticks.map((size) => `<text class="small" x="${across(size)}" y="${height - 6}" text-anchor="middle">`
    + `${bytes(size)}</text>`);
  const ends = names.map((name) => ({ name, y: up(at(name, 1e9)) })).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { end.y = Math.max(end.y, i ? ends[i - 1].y + 14 : 0); });
  const lines = ends.map(({ name, y }) => `<path class="line-${name}" d="M${sizes.map((size) =>
    `${across(size).toFixed(1)} ${up(at(name, size)).toFixed(1)}`).join("L")}"/>`
    + `<path class="line-${name}" d="M${width - right + 5} ${y}h16"/>`
    + `<text x="${width - right + 25}" y="${y + 4}">${ALGORITHMS[name].title}</text>`);
  const here = across(Math.min(Math.max(state.size, 1e2), 1e9));
  $("sizes").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("sizes").setAttribute("height", height);
  $("sizes").innerHTML = `${grid.join("")}${labels.join("")}${lines.join("")}`
    + `<line class="here" x1="${here}" x2="${here}" y1="4" y2="${height - bottom}"/>`;
  const best = (size) => names.reduce((a, b) => (at(b, size) < at(a, size) * (1 - 1e-9) ? b : a));
  const title = (name) => ALGORITHMS[name].title;
  const now = best(state.size);
  $("fastest").textContent = `For ${bytes(state.size)} on ${state.ranks} ranks, ${title(now)} is the fastest by formula:`
    + ` ${seconds(at(now, state.size))}. With this latency and rate, the fastest is ${winners(best).map(([name, from, to]) =>
      `${title(name)}${from ? ` from ${bytes(from)}` : ""}${to ? ` up to ${bytes(to)}` : ""}`).join(", ")}.`;
}

/** Which algorithm is the fastest from which size up to which: [name, from, to], null where there is no border. */
function winners(best) {
  const latency = (name) => ALGORITHMS[name].seconds(state.ranks, state.alpha, 0);
  const slope = (name) => ALGORITHMS[name].seconds(state.ranks, 0, beta()); // seconds of each byte
  const found = [[best(ITEMSIZE), null, null]];
  for (;;) {
    const [name] = found.at(-1);
    const flatter = Object.keys(ALGORITHMS).filter((other) => slope(other) < slope(name) * (1 - 1e-9));
    const borders = flatter.map((other) =>
      [Number(((latency(other) - latency(name)) / (slope(name) - slope(other))).toPrecision(3)), other]);
    if (!borders.length) return found;
    const [border, next] = borders.reduce((a, b) => (b[0] < a[0] || (b[0] === a[0] && slope(b[1]) < slope(a[1])) ? b : a));
    found.at(-1)[2] = border;
    found.push([next, border, null]);
  }
}

function offerAll() {
  offer("ranks", "radio", RANKS.map((n) => [n, n]), (n) => n === state.ranks);
  offer("algorithms", "checkbox", Object.entries(ALGORITHMS).map(([name, { title }]) => [name, title]),
    (name) => state.shown.includes(name));
}

$("settings").addEventListener("input", ({ target }) => {
  const { name, value, checked } = target;
  if (name === "ranks") state.ranks = Number(value);
  else if (name === "algorithms") {
    state.shown = inOrder(checked ? [...state.shown, value] : state.shown.filter((each) => each !== value));
  } else fields.read();
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
