"""Move messages: a wire sends and receives (wire.py), and below it are the ways of the bytes (README.md)."""
