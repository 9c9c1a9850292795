"""Wrong implementations of what sends less."""
