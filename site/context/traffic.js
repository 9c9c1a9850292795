// What a rank sends for a layer, forward and backward: context_parallel/traffic.py. All-to-alls and the
// collectives of sequence parallelism also exchange headers, which have no bytes here but their latency in seconds.

/** The bytes that a rank sends in ring attention; `head` is the numbers of one position and one head. */
function ringBytes(lengths, rank, head, kvHeads, itemsize) {
  const n = lengths.length;
  const others = (first) => sum(ranksOf(n - 1).map((step) => lengths[(rank - step - first + n) % n]));
  // Forward: the blocks that are passed on. Backward: the same, and the gradients of the other ranks' keys and values.
  return (2 * others(0) + others(1)) * 2 * head * kvHeads * itemsize;
}

/** The bytes that a rank sends in all-to-all attention: q, k, v of its tokens, y of the others', and back again. */
function allToAllBytes(lengths, rank, head, heads, kvHeads, itemsize) {
  const n = lengths.length;
  const [own, others] = [lengths[rank] * (n - 1), sum(lengths) - lengths[rank]];
  const [q, kv] = [heads / n, kvHeads / n]; // heads of a rank
  return (own + others) * (2 * q + 2 * kv) * head * itemsize;
}

/** The bytes that a rank sends in sequence parallelism, which pads a sequence to a multiple of n. */
const sequenceBytes = (n, length, head, heads, itemsize) =>
  8 * (n - 1) * Math.ceil(length / n) * heads * head * itemsize;

/** The seconds of 4 all-to-alls, in which a rank sends `sent` bytes together, with their headers (comm/cost.py). */
const allToAllSeconds = (n, sent, { alpha, beta }) => 4 * (n - 1 + log2Up(n)) * alpha + sent * beta;

/** The seconds of 4 all-gathers and 4 reduce-scatters on a ring, with their headers (comm/cost.py). */
const sequenceSeconds = (n, sent, { alpha, beta }) => 8 * (n - 1 + log2Up(n)) * alpha + sent * beta;

/** The numbers in the matrices of a layer: 12 w² if keys and values are as wide as queries. */
const layerParameters = (w, kv) => 10 * w ** 2 + 2 * w * kv;

/** The bytes that a rank sends to all-reduce the gradients of a layer on a ring. */
const gradientBytes = (n, w, kv, itemsize) => 2 * (n - 1) / n * layerParameters(w, kv) * itemsize;

const TECHNIQUES = {
  ring: { title: "ring attention", formula: "6 (n-1)/n T w<sub>kv</sub>", needsHeads: false },
  allToAll: { title: "all-to-all attention", formula: "4 (n-1)/n² T (w + w<sub>kv</sub>)", needsHeads: true },
  sequence: { title: "sequence parallelism, lesson 3", formula: "8 (n-1)/n T w", needsHeads: true },
};

/** The bytes and seconds of each technique. `ring` is what ringSeconds() returns, `lengths` the tokens of each rank. */
function techniques({ ranks: n, length, batch, heads, kvHeads, headWidth, itemsize }, lengths, ring, balanced, link) {
  const head = batch * headWidth;
  const [w, kv] = [heads * headWidth, kvHeads * headWidth];
  const most = (bytesOf) => Math.max(...ranksOf(n).map(bytesOf));
  const even = chunksOf(length, n).map(size); // all-to-all attention has contiguous chunks
  const gradients = gradientBytes(n, w, kv, itemsize);
  const sent = {
    ring: most((rank) => ringBytes(lengths, rank, head, kvHeads, itemsize)),
    allToAll: most((rank) => allToAllBytes(even, rank, head, heads, kvHeads, itemsize)),
    sequence: sequenceBytes(n, length, head, heads, itemsize),
  };
  const attention = 3 * balanced; // seconds, forward and backward
  const exchange = allToAllSeconds(n, sent.allToAll, link);
  const collectives = sequenceSeconds(n, sent.sequence, link);
  const times = {
    ring: { onLink: ring.hidden + ring.exposed, hidden: ring.hidden, exposed: ring.exposed, all: ring.forward + ring.backward },
    allToAll: { onLink: exchange, hidden: 0, exposed: exchange, all: attention + exchange },
    sequence: { onLink: collectives, hidden: null, exposed: collectives, all: attention + collectives }, // at most
  };
  return Object.entries(TECHNIQUES).map(([name, technique]) => ({
    name, ...technique, ...times[name], sent: sent[name],
    gradients: name === "sequence" ? 0 : gradients,
    isPossible: !technique.needsHeads || kvHeads % n === 0,
  }));
}

/** The first technique for which `value` is least, of those that are possible. */
const leastOf = (found, value) => found.filter(({ isPossible }) => isPossible)
  .reduce((a, b) => (value(b) < value(a) * (1 - 1e-9) ? b : a));

/** Below so many ranks the ring sends less than all-to-all attention. */
const ringLeastBelow = (w, kv) => 2 / 3 * (1 + w / kv);

/** From so many tokens in a step on, a technique with its gradients sends less than sequence parallelism. */
const tokensFrom = (name, n, w, kv) =>
  layerParameters(w, kv) / (4 * w - (name === "ring" ? 3 * kv : 2 * (w + kv) / n));
