"""Masks of a plan's units, of entries, and those that other tools have left."""
