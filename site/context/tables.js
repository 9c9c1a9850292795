// The numbers: each step by formula, and ring attention beside two other ways to cut a sequence.

function drawSteps() {
  const { n, formula: { steps, message, forward, backward, computing, exposed, hidden } } = shown;
  const rows = steps.map(({ compute, message: sent, forward: takes }, step) => [step + 1, seconds(compute),
    sent ? seconds(sent) : "no message", seconds(takes), sent > compute ? "the message" : "computing"]);
  $("steps").innerHTML = table(["step", "the busiest rank computes", "a message takes", "the step takes", "decides"], rows);
  $("steps-words").innerHTML = `The forward takes <b>${seconds(forward)}</b>. The backward computes twice as long, and sends`
    + ` keys, values and their gradients: it takes <b>${seconds(backward)}</b>. In both a rank sends 3 (n-1) = ${3 * (n - 1)}`
    + ` messages, which take ${seconds(3 * (n - 1) * message)}: <b>${seconds(hidden)}</b> are hidden behind`
    + ` ${seconds(computing)} of attention, and <b>${seconds(exposed)}</b> are exposed. The last gradients can never be`
    + " hidden.";
}

const count = (value) => Math.ceil(value).toLocaleString("en");

/** The value, in bold where it is the least of all, or nothing where the technique is not possible. */
function cell(one, found, value, say) {
  if (!one.isPossible) return "–";
  return leastOf(found, value) === one ? `<b>${say(value(one))}</b><small>least</small>` : say(value(one));
}

function drawTechniques() {
  const { techniques: found, n } = shown;
  const [total, sent, time] = [(one) => one.sent + one.gradients, (one) => one.sent, (one) => one.all];
  const reason = `<small>not possible: ${n} does not divide the ${state.kvHeads} heads of keys and values</small>`;
  const atMost = (one) => (one.name === "sequence" && one.isPossible ? "at most " : "");
  const rows = found.map((one) => [
    one.title + (one.isPossible ? "" : reason),
    one.formula,
    cell(one, found, sent, bytes),
    one.isPossible ? seconds(one.onLink) : "–",
    one.isPossible ? (one.hidden === null ? "in part" : seconds(one.hidden)) : "–",
    one.isPossible ? atMost(one) + seconds(one.exposed) : "–",
    atMost(one) + cell(one, found, time, seconds),
    one.isPossible ? (one.gradients ? bytes(one.gradients) : "none") : "–",
    cell(one, found, total, bytes),
  ]);
  const heads = ["", "numbers that a rank sends", "bytes", "time on the link", "hidden", "exposed", "attention and what is exposed",
    "all-reduce of the gradients", "all bytes"];
  $("techniques").innerHTML = table(heads, rows);
  const [few, quick, least] = [sent, time, total].map((value) => leastOf(found, value).title);
  $("least").innerHTML = `For these sizes <b>${few}</b> sends least in attention${few === quick ? " and" : `, and <b>${quick}</b>`}`
    + ` takes least time by formula. With the all-reduce of the gradients, <b>${least}</b> sends least.`;
  const [w, kv] = [state.heads * state.headWidth, state.kvHeads * state.headWidth];
  $("limits").innerHTML = `Here T = ${count(state.batch * state.length)}, w = ${count(w)} and w<sub>kv</sub> = ${count(kv)}. The ring`
    + ` sends less than all-to-all attention on fewer than 2/3 (1 + w/w<sub>kv</sub>) = ${number(ringLeastBelow(w, kv))} ranks. In`
    + " both, each rank has all parameters, and their gradients are all-reduced once in a step. So they send less than sequence"
    + ` parallelism only with more tokens in a step: the ring with more than ${count(tokensFrom("ring", n, w, kv))}, all-to-all`
    + ` attention with more than ${count(tokensFrom("allToAll", n, w, kv))}. Sequence parallelism sends its`
    + " bytes for attention and MLP. The table has those of --no-overlap. By default the backward of lesson 3"
    + " gathers two times more: 10 (n-1)/n T w.";
}
