"""Find the store and the other ranks, and notice when a rank dies."""
