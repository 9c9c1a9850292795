"""Algorithms of the collectives: each file says which rank sends what to which other rank."""
