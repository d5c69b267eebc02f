"""Runs of layers with a name of their own: the paths along which constants are folded."""

from fxprune.rules.registry import register

register(
    "conv-conv", "conv-act-conv", "conv-pool-act-conv", "conv-act-pool-conv", "conv-pool-conv",
    "conv-norm-conv", "conv-norm-act-conv", "conv-norm-act-pool-conv", "conv-norm-pool-act-conv",
    "conv-act-norm-conv", "conv-act-norm-pool-conv", "conv-norm-act-norm-conv",
)  # fmt: skip
register(
    "conv-flatten-linear", "conv-pool-flatten-linear", "conv-act-flatten-linear",
    "conv-act-pool-flatten-linear", "conv-pool-act-flatten-linear",
    "conv-norm-act-flatten-linear", "conv-norm-act-pool-flatten-linear",
)  # fmt: skip
register("linear-linear", "linear-act-linear", "linear-norm-act-linear")
register("lstm-getitem-linear", "lstm-getitem-layernorm-linear")
register(
    "conv-output", "conv-act-output", "conv-pool-output", "conv-norm-output",
    "linear-output", "linear-act-output", "lstm-getitem-output",
)  # fmt: skip
