"""Products of tensors: sums over a shared dimension."""

from __future__ import annotations

from fxprune.patterns.linear import turned

from fxprune.channels import remap
from fxprune.layout import broadcast_shape
from fxprune.registry import register


@register("matmul", "bmm", "mm", "mv", "dot", "rmatmul")
def matmul(a, call):
    """(…, n, k) @ (…, k, m): k shares its units and ends."""
    first, second = call.inputs
    if call.word == "rmatmul":
        first, second = second, first
    x, y = a.channels(first), turned(a, call, second)
    z = product(a, call, x, y)
    if len(x.shape) == len(y.shape) and x.sums_to_one == len(x.shape) - 1:
        z = a.averaged(z, y, len(y.shape) - 2)  # as attention does
    return z


def product(a, call, x, y):
    first, second = len(x.shape) == 1, len(y.shape) == 1
    if first:
        x = a.view(call, x, (1, *x.shape))
    if second:
        y = a.view(call, y, (*y.shape, 1))
    lead = broadcast_shape([x.shape[:-2], y.shape[:-2]])
    rank = len(lead) + 2
    x, y = lift(x, rank), lift(y, rank)
    shape = (*lead, x.shape[-2], y.shape[-1])
    batch = [(d, d, d) for d in range(len(lead))]
    k = rank - 1
    result = a.contract(call, x, y, [(k, k - 1)], batch, {k - 1: k - 1}, {k: k}, shape)
    if first or second:
        ends = [*lead, *([] if first else [shape[-2]]), *([] if second else [shape[-1]])]
        result = a.view(call, result, tuple(ends))
    return result


def lift(x, rank):
    """Leading dimensions of size 1."""
    by = rank - len(x.shape)
    return remap(x, {d: d + by for d in range(len(x.shape))}, (1,) * by + x.shape)


@register("baddbmm", "addbmm")
def baddbmm(a, call):
    """y[b] = c[b] + x[b] w[b]; addbmm sums over b."""
    y = product(a, call, a.channels(call.inputs[1]), a.channels(call.inputs[2]))
    return a.meet(call, [a.channels(call.inputs[0]), y], lambda t: t[0] + t[1], y.shape)


# The second is what transformers runs where PyTorch has no such kernel.
@register("grouped_mm", "transformers::grouped_mm_fallback")
def grouped(a, call):
    """Runs of rows of x, each times its own matrix of a stack, as experts: (n, k) @ (g, k, m)."""
    x, w = a.channels(call.inputs[0]), a.channels(call.inputs[1])
    if len(x.shape) != 2 or len(w.shape) != 3:
        return a.unknown(call)
    w = a.freeze_dims(w, [0], "which rows go to which, data decide", call)
    w = remap(w, {1: 0, 2: 1}, w.shape[1:])
    return a.contract(call, x, w, [(1, 0)], [], {0: 0}, {1: 1}, (x.shape[0], w.shape[1]))


@register("einsum")
def einsum(a, call):
    """Two operands at a time; letters that only one of them has are summed first."""
    equation, operands = call.arg(0, "equation"), call.inputs
    if not isinstance(equation, str) or "..." in equation or len(operands) > 2:
        return a.unknown(call)
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if any(len(set(t)) != len(t) for t in terms) or not right:
        return a.unknown(call)
    parts = [
        roles(call, value, term, terms, right) for value, term in zip(operands, terms, strict=True)
    ]
    alone = [(x, t) for x, t in zip(parts, terms, strict=True)]
    alone = [sum_out(a, call, x, t, {c for u in terms if u is not t for c in u} | set(right))
             for x, t in alone]  # fmt: skip
    if len(alone) == 1:
        x, term = alone[0]
        return remap(x, {i: right.index(c) for i, c in enumerate(term)}, call.shape)
    (x, s), (y, t) = alone
    contracted = [(s.index(c), t.index(c)) for c in s if c in t and c not in right]
    batch = [(s.index(c), t.index(c), right.index(c)) for c in s if c in t and c in right]
    free_x = {i: right.index(c) for i, c in enumerate(s) if c not in t}
    free_y = {i: right.index(c) for i, c in enumerate(t) if c not in s}
    sizes = dict(zip(s, x.shape, strict=True)) | dict(zip(t, y.shape, strict=True))
    shape = tuple(sizes[c] for c in right)
    return a.contract(call, x, y, contracted, batch, free_x, free_y, shape)


def roles(call, value, term, terms, right):
    """A parameter's letters that are summed with the other operand are read, the free ones made."""
    others = {c for other in terms if other is not term for c in other}
    axes = {}
    for i, c in enumerate(term):
        role = "in" if c in others and c not in right else "out" if c not in others else "bare"
        axes[role if role not in axes else f"bare{i}"] = (i,)
    return call.tensor(value, axes)


def sum_out(a, call, x, term, needed):
    gone = [i for i, c in enumerate(term) if c not in needed]
    return (a.reduce(call, x, gone, False) if gone else x), "".join(c for c in term if c in needed)


@register("outer")
def outer(a, call):
    """y[i, j] = x[i] w[j]."""
    x, y = (a.channels(v) for v in call.inputs)
    column = a.view(call, x, (*x.shape, 1))
    return a.meet(call, [column, y], lambda t: t[0] * t[1])
