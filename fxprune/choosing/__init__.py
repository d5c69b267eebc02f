"""How much each group is to lose, and which of its units."""
