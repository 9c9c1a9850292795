// The forward over time: a row for each rank, with the messages that it waits for, and a row for the formula.

const BAR = 20; // height of what a rank does; below it are its messages
const rowHeight = (n) => (n > 5 ? 31 : 36);

let chart; // the elements that change with time

/** A text in the middle of a bar, as long as there is space for it: the first of `texts` that fits. */
function inside(texts, from, to, y, kind = "") {
  const fitting = texts.find((each) => each.length * 6.6 + 6 < x(to) - x(from));
  const middle = ((x(from) + x(to)) / 2).toFixed(1);
  return fitting === undefined ? "" : `<text class="inside ${kind}" x="${middle}" y="${y + 14}">${fitting}</text>`;
}

function bar(kind, from, to, y, height) {
  const width = x(to) - x(from);
  if (to <= from) return "";
  return `<rect class="${kind}" x="${x(from).toFixed(2)}" width="${Math.max(0.5, width - (width > 4 ? 1 : 0)).toFixed(2)}"`
    + ` y="${y}" height="${height}"/>`;
}

/** A rank's steps, and below them the keys and values that travel to it. */
function rankRow(row, rank, y) {
  const steps = row.map(({ source, begin, computed, end, incoming }) => {
    const arriving = incoming ? bar(`arriving rank${incoming.source}`, incoming.leaves, incoming.arrives, y + BAR + 2, 5) : "";
    const computing = bar(`computing rank${rank}`, begin, computed, y, BAR);
    const whose = [`keys of rank ${source}`, `keys of ${source}`, `${source}`];
    return computing + (computing && inside(whose, begin, computed, y, `rank${rank}`))
      + bar("waiting", computed, end, y, BAR) + arriving;
  });
  const label = place.left < 50 ? rank : `rank ${rank}`;
  return `<text x="${place.left - 8}" y="${y + 14}" text-anchor="end">${label}</text>`
    + bar("lane", 0, shown.timeline.makespan, y, BAR) + steps.join("");
}

/** The row of the formula: how long each step takes, and whether computing or the message takes so long. */
function formulaRow(y) {
  let begin = 0;
  const steps = shown.formula.steps.map(({ compute, message, forward }) => {
    const [from, to] = [begin, begin += forward];
    const what = compute >= message ? "compute" : "message";
    return bar(`longer ${what}`, from, to, y, BAR) + inside([`${what} ${seconds(forward)}`, what], from, to, y);
  });
  const label = place.left < 50 ? "Σ" : "formula";
  return `<text x="${place.left - 8}" y="${y + 14}" text-anchor="end">${label}</text>${steps.join("")}`;
}

function facts() {
  const { n, isCausal, timeline: { makespan }, formula, balanced } = shown;
  const [words, value] = imbalance(state.cut, isCausal, n);
  const rows = [
    ["makespan", seconds(makespan), "makespan", "formula Σ max(compute, message)", seconds(formula.forward)],
    ["balanced ideal", seconds(balanced), "balanced", "computing / n", ""],
    ["ratio", number(makespan / balanced), "ratio", `if messages are hidden ${words}`, value === 1 ? "" : number(value)],
  ];
  return `<dl>${rows.map(([what, shownValue, kind, how, by]) => `<div><dt>${what}</dt><dd class="${kind}">${shownValue}</dd>`
    + `<dd class="formula">${how}${by && ` = <span class="${kind}-formula">${by}</span>`}</dd></div>`).join("")}</dl>`;
}

/** A vertical line at a time, with words beside it where the row of the marks is. */
function mark(kind, time, words, y) {
  const isLate = time > horizon * 0.6;
  return `<line class="${kind}" x1="${x(time)}" x2="${x(time)}" y1="0" y2="${y}"/>`
    + `<text class="small" x="${x(time) + (isLate ? -5 : 5)}" y="${y - 3}"`
    + ` text-anchor="${isLate ? "end" : "start"}">${words}</text>`;
}

function drawTimeline() {
  const { n, timeline: { rows, makespan }, timelines, balanced } = shown;
  const row = rowHeight(n);
  const bottom = (n + 1) * row;
  const height = bottom + 34;
  const other = Object.keys(CUTS).find((name) => name !== state.cut);
  const otherEnds = timelines[other].makespan;
  const differs = Math.abs(otherEnds - makespan) > 1e-6 * horizon;
  const isFar = Math.abs(x(otherEnds) - x(balanced)) > 300; // so that the words beside the lines do not meet
  const { title, idea } = CUTS[state.cut];
  $("charts").innerHTML = `<figure>
    <figcaption><h2>${title[0].toUpperCase() + title.slice(1)}</h2><p>${idea}</p>${facts()}</figcaption>
    <svg role="img" aria-label="A row for each rank: when it computes, waits, and which keys and values travel to it"
      height="${height}" viewBox="0 0 ${place.width} ${height}">
      ${rows.map((each, rank) => rankRow(each, rank, rank * row)).join("")}${formulaRow(n * row)}
      <rect class="veil" y="0" height="${bottom}"/>
      ${mark("ideal", balanced, "balanced ideal", bottom + 16)}
      ${differs ? mark("other", otherEnds, `end with the ${other} cut`, bottom + (isFar ? 16 : 32)) : ""}
      <line class="cursor" y1="0" y2="${bottom}"/></svg>
    <p class="words"></p></figure>`;
  const find = (what) => $("charts").querySelector(what);
  chart = { veil: find(".veil"), cursor: find(".cursor"), words: find(".words") };
}

/** The step that each rank is in, or null when it has done all. */
const stepsNow = () => shown.timeline.rows.map((row) => row.find(({ end }) => state.time < end) ?? null);

const flying = () => shown.timeline.messages.filter(({ leaves, arrives }) => leaves <= state.time && state.time < arrives);

function showTimeline() {
  const at = x(state.time);
  chart.cursor.setAttribute("x1", at);
  chart.cursor.setAttribute("x2", at);
  chart.veil.setAttribute("x", at);
  chart.veil.setAttribute("width", Math.max(0, x(horizon) + 1 - at));
  chart.words.innerHTML = wordsNow();
}

const many = (count, one, several = `${one}s`) => `${count} ${count === 1 ? one : several}`;

/** "Steps 2 and 3 of 4. 3 ranks compute, 1 rank waits, and 2 messages are on their way." */
function wordsNow() {
  const now = stepsNow().filter(Boolean);
  if (!now.length) return "<b>Done.</b> All queries have met all keys.";
  const steps = [...new Set(now.map(({ step }) => step + 1))].sort();
  const waiting = now.filter(({ computed }) => computed <= state.time).length;
  const said = [
    [now.length - waiting, "rank computes", "ranks compute"], [waiting, "rank waits", "ranks wait"],
    [shown.n - now.length, "rank has done all", "ranks have done all"],
    [flying().length, "message is on its way", "messages are on their way"],
  ].filter(([count]) => count).map((each) => many(...each));
  return `<b>Step${steps.length > 1 ? "s" : ""} ${steps.join(" and ")} of ${shown.n}.</b> ${said.join(", ")}.`;
}
