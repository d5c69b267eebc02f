"""Tensors that something computes: masks, parametrizations, hooks."""
