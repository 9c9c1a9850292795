// Write a table: the puzzle that is open, the cell that is chosen, and what the buttons do.

const puzzles = JSON.parse($("data").textContent);
const SPARE = 4; // steps beyond the budget, to solve a puzzle in more steps first
const STORE = "workbook puzzles";
const state = { puzzle: puzzles[0], table: [], row: 0, step: 0, undone: [] };

const kept = load(); // {best: {name: {steps, peak, text}}, drafts: {name: text}}

function load() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    return { best: stored.best ?? {}, drafts: stored.drafts ?? {} };
  } catch { // what is stored is not ours, or the browser stores nothing
    return { best: {}, drafts: {} };
  }
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(kept));
  } catch { /* then the best tables last until the page is closed */ }
}

/** "La .|. F0a": rows between "|", jobs between spaces, "." for nothing. */
const asText = (rows) => rows.map((row) => {
  const last = row.findLastIndex((job) => job);
  return row.slice(0, last + 1).map((job) => job || ".").join(" ") || ".";
}).join("|");

function fromText(given, { ranks, budget }) {
  const rows = given.split("|").map((line) => line.trim().split(/\s+/).map((job) => (job === "." ? "" : job.slice(0, 8))));
  const longest = Math.max(...rows.map((row) => row.length));
  const columns = Math.min(Math.max(budget.steps + SPARE, longest), 99);
  return Array.from({ length: 2 * ranks }, (_, i) => Array.from({ length: columns }, (_, step) => rows[i]?.[step] ?? ""));
}

function openPuzzle(name, given) {
  state.puzzle = puzzles.find((each) => each.name === name) ?? puzzles[0];
  state.table = fromText(given ?? kept.drafts[state.puzzle.name] ?? "", state.puzzle);
  state.undone = [];
  toStart();
}

function toStart() {
  Object.assign(state, { row: 1, step: 0 });
  draw();
  $("scroll").scrollLeft = 0;
}

/** The cell in which to go on: in the rank's other row where this one could only free something. */
function cellAfter(row, step) {
  const next = Math.min(step + 1, state.table[0].length - 1);
  const other = row ^ 1;
  const goesOn = (each) => possibleIn(each, next).jobs.some((job) => kindOf(job) !== "free");
  return [!goesOn(row) && !state.table[other][next] && goesOn(other) ? other : row, next];
}

const following = () => puzzles[puzzles.indexOf(state.puzzle) + 1];

/** Replace the table by one that is changed, and remember the old one. */
function change(rows) {
  state.undone.push(state.table);
  state.table = rows;
  draw();
}

/** The table with a job in a cell. A collective is put on all ranks that have its layer. */
function withJob(job, row, step) {
  const [, layer] = job.match(/^(?:RSg|AG[wg])(\d)$/) ?? [];
  const own = Math.floor(row / 2);
  const group = layer === undefined ? [own] : new Ranks(state.puzzle).group(layer);
  const cells = group.includes(own) ? group.map((rank) => 2 * rank + row % 2) : [row];
  return state.table.map((jobs, i) => (cells.includes(i) ? jobs.with(step, job) : jobs));
}

const EDITS = {
  clear: () => change(state.table.with(state.row, state.table[state.row].with(state.step, ""))),
  insert: () => change(state.table.map((row) => row.toSpliced(state.step, 0, ""))),
  remove: () => change(state.table.map((row) => [...row.toSpliced(state.step, 1), ""])),
  restart: () => {
    change(fromText("", state.puzzle));
    toStart();
  },
  best: () => change(fromText(kept.best[state.puzzle.name].text, state.puzzle)),
  undo: () => {
    state.table = state.undone.pop() ?? state.table;
    draw();
  },
  copy: async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      draw("The link is copied. ");
    } catch { // a browser may forbid it
      draw("The link is this page's address: copy it there. ");
    }
  },
};

function choose(row, step, isFocused = true) {
  Object.assign(state, { row: Math.min(Math.max(row, 0), state.table.length - 1),
    step: Math.min(Math.max(step, 0), state.table[0].length - 1) });
  drawChosen();
  if (isFocused) cellOf(state.row, state.step).focus();
}

$("settings").addEventListener("input", ({ target }) => {
  openPuzzle(target.value);
  document.querySelector("#puzzle :checked").focus(); // the choices are new elements
});

$("next").addEventListener("click", () => {
  openPuzzle(following()?.name);
  cellOf(1, 0).focus({ preventScroll: true });
  $("task").scrollIntoView();
});

$("grid").addEventListener("click", ({ target }) => {
  const cell = target.closest(".cell");
  if (cell) choose(Number(cell.dataset.row), Number(cell.dataset.step));
});

$("grid").addEventListener("keydown", (event) => {
  const ways = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const way = ways[event.key];
  if (way) choose(state.row + way[0], state.step + way[1]);
  else if (event.key === "Delete" || event.key === "Backspace") EDITS.clear();
  else return;
  event.preventDefault();
});

$("palette").addEventListener("click", ({ target }) => {
  const job = target.closest("button")?.value;
  if (!job) return;
  const { row, step } = state;
  change(withJob(job, row, step));
  choose(...cellAfter(row, step), false);
  cellOf(state.row, state.step).scrollIntoView({ block: "nearest", inline: "nearest" });
});

$("edits").addEventListener("click", ({ target }) => EDITS[target.value]?.());

$("program").addEventListener("change", ({ target }) => {
  const lines = target.value.split("\n").filter((line) => line.trim()).map((line) => line.replace(/^.*:/, ""));
  change(fromText(lines.join("|"), state.puzzle));
});

function start() {
  openPuzzle(linked.puzzle, linked.table);
}
