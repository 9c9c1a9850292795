// Who sends what to whom in an all-reduce: the rounds of comm/algorithms, and the formulas of comm/cost.py.
//
// A message carries the elements from `begin` to `end` of the tensor. The receiver adds what is partial (`adds`),
// and copies what is complete.

const log2Down = (n) => Math.floor(Math.log2(n));
const ranksOf = (n) => Array.from({ length: n }, (_, rank) => rank);

/** The elements of chunk `i` of n, as comm/shards.py cuts them: the first chunks may have one more. */
function chunk(numel, n, i) {
  const [base, longer] = [Math.floor(numel / n), numel % n];
  const begin = i * base + Math.min(i, longer);
  return { begin, end: begin + base + (i < longer ? 1 : 0) };
}

function flatRounds(n, numel) {
  const others = ranksOf(n).slice(1);
  const full = { begin: 0, end: numel };
  return [
    { words: "Every rank sends its tensor to rank 0, whose link carries them one after the other.",
      messages: others.map((rank) => ({ from: rank, to: 0, ...full, adds: true })) },
    { words: "Rank 0 sends the sum to every rank, over its one link.",
      messages: others.map((rank) => ({ from: 0, to: rank, ...full, adds: false })) },
  ];
}

function treeRounds(n, numel) {
  const full = { begin: 0, end: numel };
  const pairs = (distance) => ranksOf(n).filter((rank) => rank % (2 * distance) === 0 && rank + distance < n)
    .map((parent) => ({ parent, child: parent + distance }));
  const distances = ranksOf(log2Up(n)).map((k) => 2 ** k);
  const up = distances.map((distance) => ({
    words: `Reduce: children at distance ${distance} send their sums to their parents.`,
    messages: pairs(distance).map(({ parent, child }) => ({ from: child, to: parent, ...full, adds: true })),
  }));
  const down = distances.toReversed().map((distance) => ({
    words: `Broadcast: parents send the result to their children at distance ${distance}.`,
    messages: pairs(distance).map(({ parent, child }) => ({ from: parent, to: child, ...full, adds: false })),
  }));
  return [...up, ...down];
}

function ringRounds(n, numel) {
  const turn = (shift, adds) => ranksOf(n).map((from) => ({
    from, to: (from + 1) % n, ...chunk(numel, n, (from + shift + 2 * n) % n), adds,
  }));
  const steps = ranksOf(n - 1);
  return [
    ...steps.map((step) => ({ messages: turn(-1 - step, true),
      words: `Reduce-scatter, step ${step + 1} of ${n - 1}: each rank sends a chunk to the next rank, which adds it.` })),
    ...steps.map((step) => ({ messages: turn(-step, false),
      words: `All-gather, step ${step + 1} of ${n - 1}: each rank passes a complete chunk to the next rank.` })),
  ];
}

/** Put `rounds` of the largest power of two of ranks between two rounds that serve the ranks beyond it. */
function folded(n, numel, rounds) {
  const power = 2 ** log2Down(n);
  const full = { begin: 0, end: numel };
  const beyond = ranksOf(n).slice(power);
  if (!beyond.length) return rounds;
  return [
    { words: `${n} is no power of two: ranks from ${power} on first send their tensors to ranks from 0 on.`,
      messages: beyond.map((rank) => ({ from: rank, to: rank - power, ...full, adds: true })) },
    ...rounds,
    { words: `Ranks from ${power} on receive the result.`,
      messages: beyond.map((rank) => ({ from: rank - power, to: rank, ...full, adds: false })) },
  ];
}

function recursiveDoublingRounds(n, numel) {
  const power = 2 ** log2Down(n);
  return folded(n, numel, ranksOf(log2Down(n)).map((k) => ({
    words: `Partners at distance ${2 ** k} exchange their full tensors, and both add.`,
    messages: ranksOf(power).map((from) => ({ from, to: from ^ 2 ** k, begin: 0, end: numel, adds: true })),
  })));
}

function halvingDoublingRounds(n, numel) {
  const power = 2 ** log2Down(n);
  const parts = ranksOf(power).map(() => ({ begin: 0, end: numel })); // what each rank continues with
  const halving = [];
  for (let distance = power / 2; distance >= 1; distance /= 2) {
    const messages = parts.map((part, from) => {
      const middle = Math.floor((part.begin + part.end + 1) / 2);
      const [lower, upper] = [{ ...part, end: middle }, { ...part, begin: middle }];
      const to = from ^ distance;
      const [keep, give] = from < to ? [lower, upper] : [upper, lower];
      parts[from] = keep;
      return { from, to, ...give, adds: true };
    });
    halving.push({ distance, messages });
  }
  const doubling = halving.toReversed().map(({ distance, messages }) => ({
    words: `Doubling: partners at distance ${distance} exchange what they have, which is complete.`,
    // The way back: what a rank was given comes back from there, complete.
    messages: messages.map(({ from, to, begin, end }) => ({ from: to, to: from, begin, end, adds: false })),
  }));
  return folded(n, numel, [
    ...halving.map(({ distance, messages }) => ({ messages,
      words: `Halving: partners at distance ${distance} exchange halves; each adds the half that it keeps.` })),
    ...doubling,
  ]);
}

/** For each algorithm: its rounds, its formula as text, and the formula's seconds without headers. */
const ALGORITHMS = {
  flat: {
    title: "flat", idea: "rank 0 gets all tensors, and sends all results", rounds: flatRounds,
    formula: () => "2 (α + (n-1) B β)",
    seconds: (n, a, b) => 2 * (a + (n - 1) * b),
    sent: (n) => ["(n-1) B", n - 1],
  },
  tree: {
    title: "tree", idea: "up a binomial tree, and down again", rounds: treeRounds,
    formula: () => "2 L (α + B β)",
    seconds: (n, a, b) => 2 * log2Up(n) * (a + b),
    sent: (n) => ["L B", log2Up(n)],
  },
  ring: {
    title: "ring", idea: "n-1 steps to reduce chunks, n-1 steps to gather them", rounds: ringRounds,
    formula: () => "2 (n-1) (α + B/n β)",
    seconds: (n, a, b) => 2 * (n - 1) * (a + b / n),
    sent: (n) => ["2 (n-1)/n B", 2 * (n - 1) / n],
  },
  recursive_doubling: {
    title: "recursive doubling", idea: "full tensors, exchanged with log n partners", rounds: recursiveDoublingRounds,
    formula: (n) => (isPower(n) ? "L (α + B β)" : "(l+2) (α + B β)"),
    seconds: (n, a, b) => (log2Down(n) + folds(n)) * (a + b),
    sent: (n) => (isPower(n) ? ["L B", log2Up(n)] : ["(l+1) B", log2Down(n) + 1]),
  },
  halving_doubling: {
    title: "halving-doubling", idea: "ever smaller parts to reduce, and back to gather", rounds: halvingDoublingRounds,
    formula: (n) => (isPower(n) ? "2 L α + 2 (n-1)/n B β" : "2 l α + 2 (p-1)/p B β + 2 (α + B β)"),
    seconds: (n, a, b) => 2 * log2Down(n) * a + 2 * (1 - 2 ** -log2Down(n)) * b + folds(n) * (a + b),
    sent: (n) => (isPower(n) ? ["2 (n-1)/n B", 2 * (n - 1) / n]
      : ["2 (p-1)/p B + B", 2 * (1 - 2 ** -log2Down(n)) + 1]),
  },
};
const isPower = (n) => 2 ** log2Down(n) === n;
const folds = (n) => (isPower(n) ? 0 : 2);

/** The time that the headers add which the ranks exchange first (comm/wire/handshake.py). */
const headerSeconds = (n, alpha) => log2Up(n) * alpha;

/**
 * When each message leaves and arrives. A round starts when the one before has ended. A message takes
 * alpha + bytes * beta; a link carries one message at a time, in each direction.
 */
function timelineOf(name, n, numel, itemsize, alpha, beta) {
  let begin = 0;
  const rounds = ALGORITHMS[name].rounds(n, numel).map(({ words, messages }, round) => {
    const busy = new Map(); // until when each link is, by direction and rank
    const until = (link) => busy.get(link) ?? begin;
    const timed = messages.filter((message) => message.end > message.begin).map((message) => {
      const bytes = (message.end - message.begin) * itemsize;
      const [out, into] = [`out ${message.from}`, `in ${message.to}`];
      const leaves = Math.max(until(out), until(into));
      busy.set(out, leaves + bytes * beta).set(into, leaves + bytes * beta);
      return { ...message, round, bytes, leaves, arrives: leaves + alpha + bytes * beta, alpha };
    });
    const ends = Math.max(begin, ...timed.map(({ arrives }) => arrives));
    const timedRound = { words, begin, end: ends, messages: timed };
    begin = ends;
    return timedRound;
  });
  const sent = ranksOf(n).map((rank) => {
    const its = rounds.flatMap(({ messages }) => messages).filter(({ from }) => from === rank);
    return { bytes: its.reduce((sum, { bytes }) => sum + bytes, 0), messages: its.length };
  });
  return { name, n, numel, rounds, seconds: begin, sent };
}

/** The borders at which messages cut the tensor, from 0 to its end. */
function bordersOf({ rounds, numel }) {
  const all = rounds.flatMap(({ messages }) => messages.flatMap(({ begin, end }) => [begin, end]));
  return [...new Set([0, ...all, numel])].sort((a, b) => a - b);
}

/** Whose values are in each part of each rank's tensor at a time: a set of ranks, as the bits of a number. */
function contentsAt(timeline, borders, time) {
  const parts = borders.slice(0, -1);
  let held = ranksOf(timeline.n).map((rank) => parts.map(() => 2 ** rank));
  for (const round of timeline.rounds) {
    if (round.begin > time) break;
    const before = held;
    held = held.map((row) => [...row]);
    for (const { from, to, begin, end, adds, arrives } of round.messages) {
      if (arrives > time) continue;
      parts.forEach((part, i) => {
        if (part >= begin && part < end) held[to][i] = adds ? held[to][i] | before[from][i] : before[from][i];
      });
    }
  }
  return held;
}
