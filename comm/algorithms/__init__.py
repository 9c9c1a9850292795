"""Who sends what to whom in a collective: one file for each pattern."""
