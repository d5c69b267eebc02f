"""Recording one run of a model as a graph."""
