// How a sequence is cut, and which parts of the attention are between two ranks: context_parallel/sequence_cut.py.
// A cut is a list of chunks for each rank, and a chunk has the positions from `start` up to `stop`.

const ranksOf = (n) => Array.from({ length: n }, (_, rank) => rank);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const size = ({ start, stop }) => stop - start;

/** The chunks of a sequence, as equally long as possible: the first ones are a token longer. */
function chunksOf(length, count) {
  let stop = 0;
  return ranksOf(count).map((i) => {
    const start = stop;
    stop += Math.floor(length / count) + (i < length % count ? 1 : 0);
    return { start, stop };
  });
}

const CUTS = {
  contiguous: {
    title: "contiguous",
    idea: "rank r has chunk r of n, so under a causal mask the last rank computes most",
    of: (length, n) => chunksOf(length, n).map((chunk) => [chunk]),
  },
  zigzag: {
    title: "zigzag",
    idea: "each rank has an early and a late chunk, chunks r and 2n-1-r of 2n",
    of(length, n) {
      const chunks = chunksOf(length, 2 * n);
      return ranksOf(n).map((rank) => [chunks[rank], chunks[2 * n - 1 - rank]]);
    },
  },
};

const lengthOf = (cut, rank) => sum(cut[rank].map(size));

/** The chunks of a rank that are not empty, and where they lie among its tokens. */
function placed(chunks) {
  let stop = 0;
  return chunks.map((chunk) => {
    stop += size(chunk);
    return { chunk, own: { start: stop - size(chunk), stop } };
  }).filter(({ chunk }) => size(chunk));
}

/**
 * The parts of the attention of a rank's queries to the keys of rank `source`. `queries` and `keys` are counted among
 * the tokens of their ranks, `rows` and `columns` in the sequence. Parts in which no pair attends are left out.
 */
function partsOf(cut, rank, source, isCausal) {
  return placed(cut[rank]).flatMap(({ chunk: rows, own: queries }) => placed(cut[source])
    .filter(({ chunk }) => !isCausal || chunk.start <= rows.start) // other keys are later than all queries
    .map(({ chunk: columns, own: keys }) =>
      ({ queries, keys, rows, columns, isCausal: isCausal && columns.start === rows.start })));
}

/** How many pairs of a query and a key are computed, in one head of one example. */
const pairsOf = ({ queries, keys, isCausal }) =>
  (isCausal ? size(queries) * (size(keys) + 1) / 2 : size(queries) * size(keys));

/** Whose keys a rank has in a step of the ring. */
const sourceOf = (rank, step, n) => (rank - step + n) % n;

/** The pairs of each step of the ring, for each rank. */
const pairsOfRanks = (cut, isCausal) => ranksOf(cut.length).map((rank) => ranksOf(cut.length).map((step) =>
  sum(partsOf(cut, rank, sourceOf(rank, step, cut.length), isCausal).map(pairsOf))));

/** For each step of the ring, the pairs that the busiest rank computes. */
function stepPairs(cut, isCausal) {
  const pairs = pairsOfRanks(cut, isCausal);
  return ranksOf(cut.length).map((step) => Math.max(...pairs.map((row) => row[step])));
}

/** The pairs of each rank if all computed equally many. */
const balancedPairs = (cut, isCausal) => sum(pairsOfRanks(cut, isCausal).flat()) / cut.length;

/** How much longer the busiest rank computes than in a balanced division, for long sequences: [formula, value]. */
const imbalance = (name, isCausal, n) => (name === "contiguous" && isCausal ? ["(2n-1)/n", (2 * n - 1) / n] : ["1", 1]);
