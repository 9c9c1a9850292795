// The time of ring attention: step by step for each rank, and by the formulas of context_parallel/makespan.py.

/** Seconds of a pair: causal attention to the sequence takes `causal` seconds on one rank (context_parallel/clock.py). */
const secondsPerPair = (causal, length) => causal / (length * (length + 1) / 2);

/**
 * When each rank computes and waits in the forward, and when messages travel. A message of keys and values leaves when
 * its sender and its receiver have begun the step. A rank begins the next step when it has computed and both of its
 * messages have arrived. `tokenBytes` are those of the keys and values of one position.
 */
function timelineOf(cut, isCausal, perPair, tokenBytes, { alpha, beta }) {
  const n = cut.length;
  const rows = ranksOf(n).map(() => []);
  const messages = [];
  let begins = ranksOf(n).map(() => 0);
  for (const step of ranksOf(n)) {
    const sent = ranksOf(step < n - 1 ? n : 0).map((from) => {
      const [to, source] = [(from + 1) % n, sourceOf(from, step, n)];
      const leaves = Math.max(begins[from], begins[to]);
      const numBytes = lengthOf(cut, source) * tokenBytes;
      return { from, to, source, step, bytes: numBytes, leaves, arrives: leaves + alpha + numBytes * beta };
    });
    begins = begins.map((begin, rank) => {
      const source = sourceOf(rank, step, n);
      const parts = partsOf(cut, rank, source, isCausal);
      const computed = begin + sum(parts.map(pairsOf)) * perPair;
      const [outgoing, incoming] = [sent[rank], sent[(rank - 1 + n) % n]];
      const end = Math.max(computed, outgoing?.arrives ?? 0, incoming?.arrives ?? 0);
      rows[rank].push({ rank, step, source, parts, begin, computed, end, outgoing, incoming });
      return end;
    });
    messages.push(...sent);
  }
  return { n, rows, messages, makespan: Math.max(...begins) };
}

/**
 * Forward and backward by formula: each step takes as long as the slower of computing and messages. `pairs` are those
 * of the busiest rank in each step, `blockBytes` those of the keys and values of one rank. What is `exposed` of the
 * messages adds to the time of computing, and the rest is `hidden`.
 */
function ringSeconds(pairs, perPair, blockBytes, { alpha, beta }) {
  const n = pairs.length;
  const message = n > 1 ? alpha + beta * blockBytes : 0;
  const steps = pairs.map((each, step) => {
    const compute = each * perPair;
    const [keys, gradients] = [step < n - 1 ? 1 : 0, step > 1 ? 1 : 0]; // under way in this step
    return { compute, message: keys * message, forward: Math.max(compute, keys * message),
      backward: Math.max(2 * compute, (keys + gradients) * message) };
  });
  const forward = sum(steps.map((each) => each.forward));
  const backward = sum(steps.map((each) => each.backward)) + message; // the last gradients travel home
  const computing = 3 * sum(steps.map(({ compute }) => compute));
  const exposed = Math.max(0, forward + backward - computing); // not below 0 by rounding
  return { message, steps, forward, backward, computing, exposed, hidden: 3 * (n - 1) * message - exposed };
}
