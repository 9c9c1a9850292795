"""Make a wire: groups, messages over gloo or nccl, the handshake, the queue of operations, a slow link."""
