"""Move bytes between ranks: messages, connections, the handshake, the work queue, the slow link."""
