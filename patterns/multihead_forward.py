"""A forward of ``nn.MultiheadAttention`` for widths that its own cannot express."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def narrow_attention(
    self,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``nn.MultiheadAttention.forward`` for heads that together are not as wide as the embedding,
    or are narrower than when they were trained: ``head_dim`` sets the scale only."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if query.is_nested:
        return _of_several_lengths(self, query), None
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
    elif not self.batch_first:
        query, key, value = (t.transpose(0, 1) for t in (query, key, value))
    weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    if self.in_proj_weight is not None:
        weights = self.in_proj_weight.chunk(3)
    biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    added = 0
    for token in (self.bias_k, self.bias_v), (0.0, 0.0) if self.add_zero_attn else (None, None):
        if token[0] is not None:
            k, v = (torch.cat([x, _token(x, t)], 2) for x, t in zip((k, v), token, strict=True))
            added += 1
    mask = None
    hinted = is_causal and key_padding_mask is None and not need_weights  # PyTorch goes by it then
    for given, shape in (
        (None if hinted else attn_mask, (1, 1, *q.shape[2:3], key.shape[1])),
        (key_padding_mask, (-1, 1, 1, key.shape[1])),
    ):
        if given is not None:
            if given.dim() == 3:
                shape = (-1, self.num_heads, *shape[2:])
            if given.dtype == torch.bool:
                given = torch.zeros_like(given, dtype=q.dtype).masked_fill_(given, float("-inf"))
            given = F.pad(given.reshape(shape), (0, added))
            mask = given if mask is None else mask + given
    dropout, scale = self.dropout if self.training else 0.0, self.head_dim**-0.5
    attended = None
    if need_weights:
        scores = q * scale @ k.transpose(-2, -1)
        attended = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        y = attended @ v
        attended = attended.mean(1) if average_attn_weights else attended
        attended = attended if batched else attended.squeeze(0)
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout, hinted, scale=scale)
    y = self.out_proj(y.transpose(1, 2).flatten(2))
    if not batched:
        return y.squeeze(0), attended
    return y if self.batch_first else y.transpose(0, 1), attended


def _of_several_lengths(self, x: torch.Tensor) -> torch.Tensor:
    """Self-attention over a nested tensor, which ``nn.TransformerEncoder`` makes of padded inputs
    in eval mode: padded again on the way."""
    lengths = [len(each) for each in x.unbind()]
    padded = torch.nested.to_padded_tensor(x, 0.0)
    padding = torch.arange(padded.shape[1]) >= torch.tensor(lengths)[:, None]
    padding = padding.to(x.device)
    y = narrow_attention(self, padded, padded, padded, padding, False)[0]
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(y, lengths, strict=True)])


def _token(x: torch.Tensor, token: torch.Tensor | float) -> torch.Tensor:
    """One more position for every head: learned, or zero."""
    shape = (1, x.shape[1], 1, x.shape[3])
    row = x.new_zeros(shape) if isinstance(token, float) else token.reshape(shape)
    return row.expand(x.shape[0], -1, -1, -1)
