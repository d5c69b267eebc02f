"""From a model and settings to a plan."""
