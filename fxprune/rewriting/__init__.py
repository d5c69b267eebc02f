"""Making channels go: in the model and in its optimizers."""
