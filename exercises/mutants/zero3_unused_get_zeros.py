"""AdamW decays unused layers in stage 3 only: what fills the room up is handed to the optimizer."""

TARGET = "data_parallel.fully_sharded.FullyShardedDataParallel.finish_gradient_sync"
KILLER = "tests.data_parallel.test_zero_mutant_killers.test_weight_decay_leaves_alone_what_no_rank_used"


def mutant(self) -> None:
    self._finish_backward()
    for block in self._all:
        for unit, gradients in block.trained:
            parts = unit.flat.pieces(gradients.shard)
            for piece, (_, part) in zip(unit.pieces, parts, strict=True):
                piece.tensor.grad = part
    self._used.clear()
    self._order_so_far = 0
    self._is_synced = True
