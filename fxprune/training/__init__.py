"""Pruning what is trained: in the middle of it, or what it has left dead."""
