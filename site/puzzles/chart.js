// Draw the table with its memory, and say what is wrong, what is possible, and what is reached.

const KINDS = { F: "forward", B: "backward", U: "update", L: "load", A: "gather", R: "reduce", "-": "free" };
const kindOf = (job) => KINDS[job[0]] ?? "send";
const cellOf = (row, step) => document.querySelector(`#grid [data-row="${row}"][data-step="${step}"]`);
const amount = (value) => String(Number(value.toFixed(2)));

function draw(said = "") {
  const { puzzle, table: rows } = state;
  const verdict = judge(puzzle, rows);
  remember(verdict);
  offer("puzzle", "radio", puzzles.map(({ name }, i) => [name, `${i + 1}${kept.best[name] ? " ✓" : ""}`]),
    (name) => name === puzzle.name);
  document.querySelectorAll("#puzzle label").forEach((label, i) => { label.title = puzzles[i].title; });
  $("task-title").textContent = `${puzzles.indexOf(puzzle) + 1}. ${puzzle.title}`;
  $("task-text").textContent = puzzle.text;
  $("given").innerHTML = given(puzzle).map(([what, value]) => `<div><dt>${what}</dt><dd>${value}</dd></div>`).join("");
  $("grid").innerHTML = gridOf(puzzle, rows, verdict);
  $("verdict").className = verdict.solved ? "solved" : "";
  $("verdict").innerHTML = said + wordsOf(puzzle, verdict);
  $("next").hidden = !verdict.solved || !following();
  document.querySelector("#edits [value=best]").hidden = !kept.best[puzzle.name];
  $("program").rows = rows.length + 1;
  $("program").value = asText(rows).split("|").map((line, i) =>
    `rank ${Math.floor(i / 2)} ${LANES[i % 2]}: ${line}`).join("\n");
  choose(state.row, state.step, false); // the table may have become smaller
  link({ puzzle: puzzle.name, table: asText(rows) });
}

function given({ microbatches, budget, sizes, fewest, name }) {
  const best = kept.best[name];
  return [
    ["microbatches", microbatches.join(", ")],
    ["budget", `${budget.steps} steps, memory ${budget.memory} on each rank`],
    ["sizes", `w and g ${sizes.weight}, x and d ${sizes.activation}${sizes.state
      ? `, optimizer state ${sizes.state} for a layer; a shard is an n-th of it` : ", no optimizer state"}`],
    ["fewest steps known", fewest],
    ["your best", best ? `${best.steps} steps, memory ${amount(best.peak)}` : "not solved yet"],
  ];
}

/** Keep the table as a draft, and as the best one if it is. */
function remember({ solved, steps, peak }) {
  const { name } = state.puzzle;
  kept.drafts[name] = asText(state.table);
  const best = kept.best[name];
  const isBetter = !best || steps < best.steps || (steps === best.steps && peak < best.peak);
  if (solved && isBetter) kept.best[name] = { steps, peak, text: kept.drafts[name] };
  save();
}

function gridOf(puzzle, rows, { memory, problem }) {
  const { steps, memory: most } = puzzle.budget;
  const columns = rows[0].map((_, step) => step);
  const late = (step) => (step >= steps ? " late" : "");
  const head = `<thead><tr><td></td>${columns.map((step) => `<th scope="col" class="${late(step)}">${step + 1}</th>`).join("")}</tr></thead>`;
  const top = Math.max(most, ...memory.flat());
  const body = puzzle.holds.map((_, rank) => {
    const lanes = [0, 1].map((lane) => {
      const row = 2 * rank + lane;
      const cells = columns.map((step) => {
        const job = rows[row][step];
        const isWrong = problem?.step === step && problem.rank === rank && problem.lane === lane;
        const isDone = !problem || step < problem.step;
        return `<td class="cell ${job ? kindOf(job) : ""}${isWrong ? " wrong" : ""}${isDone ? "" : " waits"}${late(step)}" role="gridcell"`
          + ` tabindex="-1" data-row="${row}" data-step="${step}" aria-label="rank ${rank} ${LANES[lane]}, step ${step + 1}:`
          + ` ${job ? text(job) : "nothing"}"${job ? ` title="${text(inWords(job))}"` : ""}>${text(job)}</td>`;
      });
      return `<tr><th scope="row"><span>rank </span>${rank} <span>${LANES[lane]}</span></th>${cells.join("")}</tr>`;
    });
    const bars = columns.map((step) => {
      const held = memory[rank][step];
      return held === undefined ? `<td class="${late(step)}"></td>` : `<td class="${late(step)}">`
        + `<i class="${held > most ? "over" : ""}" style="height: ${(28 * held / top).toFixed(1)}px"></i>`
        + `<u style="bottom: ${(28 * most / top).toFixed(1)}px"></u><b>${amount(held)}</b></td>`;
    });
    return `<tbody>${lanes.join("")}<tr class="memory"><th scope="row"><span>memory</span></th>${bars.join("")}</tr></tbody>`;
  });
  return head + body.join("");
}

function wordsOf({ budget }, { problem, over, left, steps, peak, solved }) {
  if (problem) {
    return `<b>Step ${problem.step + 1}, rank ${problem.rank}:</b> ${text(problem.why)}`;
  }
  if (solved) return `<b>Solved</b> in ${steps} steps with a memory of ${amount(peak)}.`;
  const high = over.length
    ? `Memory: rank ${over[0].rank} needs ${amount(over[0].memory)} in step ${over[0].step + 1}, and has ${budget.memory}. ` : "";
  if (left.length) return `${high}Still to do: ${left.slice(0, 3).join("; ")}${left.length > 3 ? `; and ${left.length - 3} more` : ""}.`;
  return `All is updated. ${high}${steps > budget.steps ? `It takes ${steps} steps, and the budget is ${budget.steps}.` : ""}`;
}

/** All jobs of a rank's lane that can help: those of its layers, and messages to a rank that needs them. */
function jobsOf({ holds, layers, microbatches }, rank, lane) {
  const all = Array.from({ length: layers }, (_, layer) => layer);
  const has = (layer, other = rank) => layer in holds[other];
  const own = all.filter((layer) => has(layer));
  const each = (kind, some) => some.flatMap((layer) => microbatches.map((micro) => `${kind}${layer}${micro}`));
  if (lane === 0) return [...each("F", own), ...each("B", own), ...own.map((layer) => `U${layer}`)];

  const shared = own.filter((layer) => holds.some((_, other) => other !== rank && has(layer, other)));
  const sharded = own.filter((layer) => holds[rank][layer] !== "full");
  // A layer needs x of its own number and d of the next; x goes to the layer above, and d to the one below.
  const send = (kind, taker) => (has(taker) ? [] : each(kind, [kind === "x" ? taker : taker + 1]))
    .flatMap((name) => holds.flatMap((_, other) => (has(taker, other) ? [`${name}>${other}`] : [])));
  const messages = own.flatMap((layer) => [...send("x", layer + 1), ...send("d", layer - 1)]);
  return [...(has(0) ? microbatches.map((micro) => `L${micro}`) : []),
    ...sharded.map((layer) => `AGw${layer}`), ...shared.map((layer) => `RSg${layer}`), ...shared.map((layer) => `AGg${layer}`),
    ...messages, ...sharded.map((layer) => `-w${layer}`), ...each("-x", own), ...each("-d", own.map((layer) => layer + 1))];
}

/** A job in words, for those who do not know its letters yet. */
function inWords(job) {
  const name = job.replace(/^(AG|RS|[FBUL-])|>.*/g, "");
  return {
    F: `forward of layer ${job[1]} on ${job[2]}`, B: `backward of layer ${job[1]} on ${job[2]}`, U: `update w${job[1]}`,
    L: `load ${job[1]}`, A: `all-gather ${name}`, R: `reduce-scatter ${name}`, "-": `free ${name}`,
  }[job[0]] ?? `send ${name} to rank ${job.at(-1)}`;
}

const buttons = (jobs) => jobs.map((job) => `<button type="button" class="${kindOf(job)}" value="${text(job)}"`
  + ` title="${inWords(job)}">${text(job)}</button>`).join("");

/** Run the first steps, and return what went wrong. */
function problemWithin(ranks, rows, steps) {
  const memory = rows.map(() => []);
  for (let step = 0; step < steps; step += 1) {
    const problem = runStep(ranks, rows, step, memory);
    if (problem) return problem;
  }
  return null;
}

/** Whether what `rows` has new in a step could run there, if the other ranks did nothing else. */
function canRun(before, rows, step) {
  const ranks = Object.assign(new Ranks(before.puzzle), { items: [...before.items] });
  const column = rows.map((row, i) => (row === state.table[i] ? [] : [row[step]]));
  return !runStep(ranks, column, 0, rows.map(() => []));
}

/** The jobs that can run in a cell, or the problem of a step before it, and whether all is done by then. */
function possibleIn(row, step) {
  const { puzzle, table: rows } = state;
  const before = new Ranks(puzzle);
  const problem = problemWithin(before, rows, step);
  const jobs = jobsOf(puzzle, Math.floor(row / 2), row % 2).filter((job) =>
    !problem && canRun(before, withJob(job, row, step), step));
  return { problem, jobs, isDone: !problem && !missing(before).length };
}

/** Show which cell is chosen, and what can be put there. */
function drawChosen() {
  const { puzzle, row, step } = state;
  document.querySelectorAll("#grid .chosen").forEach((cell) => {
    cell.classList.remove("chosen");
    cell.tabIndex = -1;
  });
  cellOf(row, step).classList.add("chosen");
  cellOf(row, step).tabIndex = 0;
  const [rank, lane] = [Math.floor(row / 2), row % 2];
  $("palette-title").textContent = `Rank ${rank} ${LANES[lane]} in step ${step + 1}`;
  const { problem, jobs, isDone } = possibleIn(row, step);
  $("possible").innerHTML = problem ? `<p>First mend step ${problem.step + 1}: nothing runs after it.</p>`
    : buttons(jobs) || `<p>${isDone ? "Nothing is left to do." : "No job can run here yet."}</p>`;
  $("others").innerHTML = buttons(jobsOf(puzzle, rank, lane));
}
