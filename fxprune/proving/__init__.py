"""Whether the pruned model computes what the masked one computes."""
