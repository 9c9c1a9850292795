// What is in the messages of a round: on the circle as small tensors, and in words.

const countOf = (set, n) => ranksOf(n).filter((rank) => Math.floor(set / 2 ** rank) % 2).length;

/** How many ranks' values are in a message: as many as its sender has when the round begins. */
function ranksIn({ from, begin }, round, timeline, borders) {
  const row = contentsAt(timeline, borders, round.begin)[from];
  return countOf(row[borders.indexOf(begin)], timeline.n);
}

/** A tensor of the width `width`, of which the parts from `begin` to `end` are filled as far as they have all sums. */
function tensor(middle, center, width, height, parts, numel, n) {
  const [left, bottom] = [middle - width / 2, center + height / 2];
  const scale = (element) => left + width * element / numel;
  return `<rect class="buffer" x="${left.toFixed(1)}" y="${(center - height / 2).toFixed(1)}" width="${width}" height="${height}"/>`
    + parts.map(({ begin, end, count }) => {
      const [from, to, full] = [scale(begin), scale(end), height * count / n];
      return `<rect class="${count === n ? "complete" : "partial"}" data-ranks="${count}" x="${from.toFixed(2)}"`
        + ` width="${Math.max(1, to - from).toFixed(2)}" y="${(bottom - full).toFixed(2)}" height="${full.toFixed(2)}"/>`;
    }).join("");
}

/** A message on its way: the part of the tensor that it carries. */
function parcel(message, round, timeline, borders, { node, width }) {
  const { from, to, leaves, arrives } = message;
  const [a, b, way] = [node(from), node(to), (state.time - leaves) / (arrives - leaves)];
  const part = { ...message, count: ranksIn(message, round, timeline, borders) };
  return `<g class="parcel">${tensor(a.x + way * (b.x - a.x), a.y + way * (b.y - a.y), width * 0.65, 11, [part],
    timeline.numel, timeline.n)}</g>`;
}

/** "8 messages of 125 kB: 50 µs + 100 µs each": what a round costs. */
function roundWords({ messages, begin, end }) {
  if (!messages.length) return "It has no messages: there are fewer elements than ranks.";
  const sizes = messages.map(({ bytes: size }) => size);
  const most = Math.max(...sizes);
  const many = `${messages.length} message${messages.length > 1 ? "s" : ""}`;
  const upTo = most > Math.min(...sizes) ? "at most " : "";
  const cost = `${many} of ${upTo}${bytes(most)}: α + b β = ${seconds(state.alpha)} + ${seconds(most * beta())}`;
  const waits = messages.some(({ leaves }) => leaves > begin);
  return waits ? `${cost} each, one after the other over one link: ${seconds(end - begin)} in all.` : `${cost}.`;
}

function messageRows(round, timeline, borders) {
  return round.messages.map((message) => {
    const { from, to, begin, end, bytes: size, leaves, arrives, adds } = message;
    const count = ranksIn(message, round, timeline, borders);
    const what = count === timeline.n ? "the sum of all ranks" : count === 1 ? "its own values" : `the sum of ${count} ranks`;
    return [`${from} → ${to}`, `${begin} to ${end - 1}`, bytes(size), what, adds ? "adds" : "copies",
      seconds(leaves), seconds(arrives)];
  });
}

const MESSAGE_HEADS = ["from → to", "elements", "size", "what is in it", "the receiver", "leaves at", "arrives at"];
let listed = []; // the algorithms whose messages are listed

/** List the messages of the round, if the list is open. */
function listMessages({ timeline, borders, list }, round) {
  if (!list.open || list.dataset.round === String(round)) return;
  list.dataset.round = round;
  const rows = round < 0 ? [] : messageRows(timeline.rounds[round], timeline, borders);
  list.querySelector("table").innerHTML = rows.length ? table(MESSAGE_HEADS, rows) : "<tr><td>There are none now.</td></tr>";
}

$("charts").addEventListener("toggle", ({ target }) => {
  const { run } = target.closest("figure").dataset;
  listed = listed.filter((name) => name !== run).concat(target.open ? run : []);
  showMoment();
}, true);
