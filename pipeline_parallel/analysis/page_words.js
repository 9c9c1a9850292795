// What a cell is and why it started when it did: in words beside it, and as lines through the ranks.

const WORDS = { F: "forward", B: "full backward", I: "input gradient", W: "weight gradient" };

/** What the cell is, and why it started when it did. */
function describe({ run, elements }, cell) {
  const from = (need) => `${need.name}${need.rank === cell.rank ? "" : ` from rank ${need.rank}`}`;
  const needs = cell.needs.map((name) => run.cells.get(name));
  const before = cell.i ? run.rows[cell.rank][cell.i - 1] : { end: 0 };
  const late = needs.reduce((a, b) => (b.end > (a?.end ?? -1) ? b : a), null);
  const tiny = horizon * 1e-6;
  const needed = needs.length ? `It needs ${needs.map(from).join(" and ")}.`
    : "It needs nothing: its input comes from the data.";
  let why = "";
  if (late && cell.start > before.end + tiny) {
    why = ` The rank was idle for ${number(cell.start - before.end)} until the result of ${late?.name} arrived.`;
  } else if (cell.i && cell.start > (late?.end ?? 0) + tiny) {
    why = ` Until ${number(before.end)} the rank was busy with ${before.name}.`;
  }
  return {
    title: `${cell.name}: ${WORDS[cell.kind]} of microbatch ${cell.microbatch} in stage ${cell.stage}, `
      + `on rank ${cell.rank}, from ${number(cell.start)} to ${number(cell.end)}`,
    text: needed + why,
    element: elements.get(cell.name),
  };
}

/** A frame around the cell, as an SVG path. */
function frame(run, { start, end, rank }) {
  const { cell, row } = sizes(run);
  return `M${x(start)} ${rank * row}H${x(end)}v${cell}H${x(start)}Z`;
}

/** A microbatch's way through the ranks: its cells in frames, and lines where one rank waits for another. */
function wayOf(run, microbatch) {
  const { cell: height, row } = sizes(run);
  const its = [...run.cells.values()].filter((cell) => cell.microbatch === microbatch);
  const messages = its.flatMap((taker) => taker.needs.map((name) => run.cells.get(name))
    .filter((giver) => giver.rank !== taker.rank)
    .map((giver) => {
      const [below, above] = giver.rank < taker.rank ? [height, 0] : [0, height];
      return `M${x(giver.end)} ${giver.rank * row + below}L${x(taker.start)} ${taker.rank * row + above}`;
    }));
  return its.map((cell) => frame(run, cell)).concat(messages).join("");
}

let told = null;

/** Say what the cell is, next to it, and draw its microbatch's way through the ranks. */
function tell(chart, element) {
  if (element === told) return;
  silence();
  told = element;
  const cell = chart.run.cells.get(element.dataset.action);
  const words = describe(chart, cell);
  element.setAttribute("aria-label", `${words.title}. ${words.text}`);
  for (const path of chart.ways) path.setAttribute("d", wayOf(chart.run, cell.microbatch));
  chart.frame.setAttribute("d", frame(chart.run, cell));

  const box = $("words");
  box.querySelector("b").textContent = words.title;
  box.querySelector("p").textContent = words.text;
  box.hidden = false;
  const { left } = element.getBoundingClientRect();
  const { top, bottom } = element.closest("svg").getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const below = bottom + 4 + height < innerHeight;
  box.style.left = `${Math.max(8, Math.min(left, document.documentElement.clientWidth - width - 8))}px`;
  box.style.top = `${below ? bottom + 4 : Math.max(8, top - height - 4)}px`;
}

function silence() {
  told = null;
  $("words").hidden = true;
  document.querySelectorAll(".way[d], .frame[d]").forEach((path) => path.removeAttribute("d"));
}

const chartAt = (element) => charts.find(({ figure }) => figure.contains(element));

function tellAt({ target }) {
  const cell = target.closest(".cell");
  if (cell) tell(chartAt(cell), cell);
  else silence();
}
$("charts").addEventListener("pointermove", tellAt);
$("charts").addEventListener("click", tellAt); // a tap moves no pointer
$("charts").addEventListener("pointerleave", silence);
$("charts").addEventListener("focusin", ({ target }) => {
  if (target.matches(".cell:focus-visible")) tell(chartAt(target), target);
});
$("charts").addEventListener("focusout", silence);
addEventListener("scroll", silence, { passive: true });

/** Arrows go from cell to cell: along the rank, and to the neighbouring rank at about the same time. */
$("charts").addEventListener("keydown", (event) => {
  const chart = chartAt(event.target);
  const cell = chart?.run.cells.get(event.target.dataset.action);
  const way = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (!cell || !way) return;
  event.preventDefault();
  event.stopPropagation();
  const row = chart.run.rows[cell.rank + way[0]] ?? [];
  const next = way[0] ? lastBy(row, cell.start) ?? row[0] : row[cell.i + way[1]];
  if (!next) return;
  const element = chart.elements.get(next.name);
  event.target.tabIndex = -1;
  element.tabIndex = 0;
  element.focus();
});
