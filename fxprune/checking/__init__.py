"""Whether a pattern is true, tried on numbers."""
