"""Find the store and the other ranks, notice when a rank dies, and go on without it."""
