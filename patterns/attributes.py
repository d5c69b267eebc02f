"""Attributes that say a width and that the forward need not read: ``model.num_features``."""

from fxprune.rules.registry import width

width("num_features", "embed_dim", "head_hidden_size", "hidden_size", "hidden_dim", "feature_dim",
      "in_features", "out_features", "in_channels", "out_channels", "num_channels",
      "in_chs", "out_chs", "in_dim", "out_dim", "dim", "d_model")  # fmt: skip
