"""AdamW decays layers that nobody used, in stages 1 and 2 only: zeros in a bucket pass for a gradient."""

TARGET = "data_parallel.sharded_optimizer.ShardedOptimizer.finish_gradient_sync"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_weight_decay_leaves_alone_what_no_rank_used"


def mutant(self) -> None:
    self._complete_buckets()
    for bucket in self.buckets:
        parts = bucket.flat.pieces(self.gradient_shard(bucket))
        for piece, (_, gradient) in zip(bucket.pieces, parts, strict=True):
            piece.tensor.grad = gradient
    self._used.clear()
    self._is_synced = True
