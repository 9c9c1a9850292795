// One moment of the forward: the blocks of queries and keys, the ring, and each rank in words.

const SIDE = 360; // of both pictures
const MARGIN = 24; // of the matrix, for the numbers of ranks

let blocks = []; // the elements of the matrix, with their rank and step

function drawMatrix() {
  const { timeline: { rows }, cut } = shown;
  const at = (position) => MARGIN + position / state.length * (SIDE - MARGIN);
  const font = Math.min(12, (SIDE - MARGIN) / cut.length / cut[0].length * 0.6);
  const label = (across, down, words, kind = "") => `<text class="inside ${kind}" style="font-size: ${font}px"`
    + ` x="${across.toFixed(1)}" y="${(down + font * 0.36).toFixed(1)}">${words}</text>`;
  const names = cut.flatMap((chunks, rank) => chunks.map(({ start, stop }) => {
    const middle = at((start + stop) / 2);
    return label(middle, MARGIN - 8, rank) + label(MARGIN - 9, middle, rank);
  }));
  const parts = rows.flat().flatMap(({ rank, step, parts: own }) => own.map(({ rows: queries, columns: keys, isCausal }) => {
    const [left, right, top, bottom] = [keys.start, keys.stop, queries.start, queries.stop].map(at);
    const corners = [[left, top], ...(isCausal ? [] : [[right, top]]), [right, bottom], [left, bottom]];
    const third = isCausal ? 1 / 3 : 1 / 2; // the middle of a triangle, or of a rectangle
    return `<polygon class="block rank${rank}" data-rank="${rank}" data-step="${step}"`
      + ` points="${corners.map((corner) => corner.map((each) => each.toFixed(1)).join()).join(" ")}"/>`
      + label(left + (right - left) * third, bottom - (bottom - top) * third, step + 1, `rank${rank}`);
  }));
  const inner = SIDE - MARGIN;
  $("matrix").setAttribute("viewBox", `0 0 ${SIDE} ${SIDE}`);
  $("matrix").innerHTML = `<rect class="empty" x="${MARGIN}" y="${MARGIN}" width="${inner}" height="${inner}"/>`
    + `<text class="small" x="${SIDE}" y="8" text-anchor="end">keys →</text><text class="small" x="0" y="8">queries ↓</text>`
    + names.join("") + parts.join("");
  blocks = [...$("matrix").querySelectorAll(".block")].map((element) =>
    ({ element, rank: Number(element.dataset.rank), step: Number(element.dataset.step), is: "" }));
}

function showMatrix() {
  const { rows } = shown.timeline;
  for (const block of blocks) {
    const { begin, computed } = rows[block.rank][block.step];
    const is = state.time >= computed ? "done" : state.time >= begin ? "now" : "later";
    if (is === block.is) continue;
    block.element.classList.remove(block.is || "later");
    block.element.classList.add(is);
    block.is = is;
  }
}

const RADIUS = SIDE / 2 - 34;
const NODE = { width: 46, height: 18 }; // of the queries, and of the keys and values

/** A point beside the middle of the ring. The angle of a rank's place is its number. */
function onRing(rank, radius) {
  const angle = 2 * Math.PI * rank / shown.n - Math.PI / 2;
  return { x: SIDE / 2 + radius * Math.cos(angle), y: SIDE / 2 + radius * Math.sin(angle) };
}

/** The way from a rank to its right neighbour: its begin, its end, and the point that bends it outwards. */
function wayFrom(rank) {
  const bend = 2 * 0.97 * RADIUS - Math.cos(Math.PI / shown.n) * RADIUS; // so that its middle is close to the circle
  return { from: onRing(rank, RADIUS), over: onRing(rank + 0.5, bend), to: onRing(rank + 1, RADIUS) };
}

/** The point of a way after a share of it. */
function along({ from, over, to }, share) {
  const mixed = (axis) => (1 - share) ** 2 * from[axis] + 2 * share * (1 - share) * over[axis] + share ** 2 * to[axis];
  return { x: mixed("x"), y: mixed("y") };
}

function drawRing() {
  $("ring").setAttribute("viewBox", `0 0 ${SIDE} ${SIDE}`);
  $("ring").innerHTML = ranksOf(shown.n).map((rank) => {
    const way = wayFrom(rank);
    const middle = along(way, 0.5);
    const length = Math.hypot(way.to.x - way.from.x, way.to.y - way.from.y);
    const [dx, dy] = ["x", "y"].map((axis) => 6 * (way.to[axis] - way.from[axis]) / length); // half of the arrow
    const points = [[dx, dy], [-dx - dy, -dy + dx], [-dx + dy, -dy - dx]].map(([right, down]) => [middle.x + right, middle.y + down]);
    return `<path class="arc" d="M${way.from.x} ${way.from.y}Q${way.over.x} ${way.over.y} ${way.to.x} ${way.to.y}"/>`
      + `<polygon class="head" points="${points.map((point) => point.map((each) => each.toFixed(1)).join()).join(" ")}"/>`;
  }).join("") + `<g class="nodes"></g><g class="parcels"></g>`;
}

/** A box in a rank's colour, with words in it. */
function box(kind, rank, { x: middle, y: top }, words, { width, height } = NODE) {
  return `<rect class="${kind} rank${rank}" width="${width}" height="${height}" x="${(middle - width / 2).toFixed(1)}"`
    + ` y="${top.toFixed(1)}"/>`
    + `<text class="inside rank${rank}" x="${middle.toFixed(1)}" y="${(top + height - 5).toFixed(1)}">${words}</text>`;
}

/** Whose keys a rank has: when it has done all, those of its last step. */
const sourceNow = (step, rank) => (step ?? shown.timeline.rows[rank].at(-1)).source;

function showRing() {
  const ring = $("ring");
  ring.querySelector(".nodes").innerHTML = stepsNow().map((step, rank) => {
    const { x: middle, y } = onRing(rank, RADIUS);
    return box("queries", rank, { x: middle, y: y - NODE.height }, `q ${rank}`)
      + box("visiting", sourceNow(step, rank), { x: middle, y }, `kv ${sourceNow(step, rank)}`);
  }).join("");
  const messages = flying();
  for (const kind of [".arc", ".head"]) {
    ring.querySelectorAll(kind).forEach((element, rank) =>
      element.classList.toggle("busy", messages.some(({ from }) => from === rank)));
  }
  ring.querySelector(".parcels").innerHTML = messages.map(({ from, source, leaves, arrives }) => {
    const { x: middle, y } = along(wayFrom(from), 0.2 + 0.6 * (state.time - leaves) / (arrives - leaves)); // beside the ranks
    return `<g class="parcel">${box("", source, { x: middle, y: y - 8 }, `kv ${source}`, { width: 36, height: 16 })}</g>`;
  }).join("");
}

/** What a rank does now. `step` is null when it has done all. */
function doing(step) {
  if (!step) return "done";
  const { parts, computed, incoming, outgoing } = step;
  if (state.time < computed) return `computes ${many(parts.length, "block")}`;
  const why = parts.length ? "" : "computes nothing, because these keys are later than its queries, and ";
  if (incoming && state.time < incoming.arrives) {
    return `${why}waits for keys of rank ${incoming.source} from rank ${incoming.from}`;
  }
  return `${why}waits until rank ${outgoing.to} has its keys`;
}

function showStates() {
  const rows = stepsNow().map((step, rank) => {
    const all = shown.timeline.rows[rank];
    const computes = sum(all.map(({ begin, computed }) => computed - begin));
    const waits = sum(all.map(({ computed, end }) => end - computed));
    return [`rank ${rank}`, step ? step.step + 1 : shown.n, `rank ${sourceNow(step, rank)}`, doing(step), seconds(computes),
      waits > horizon * 1e-9 ? seconds(waits) : "0 s"];
  });
  const words = table(["", "step", "has keys of", "now", "computes in all", "waits in all"], rows);
  if ($("states").innerHTML !== words) $("states").innerHTML = words;
}
