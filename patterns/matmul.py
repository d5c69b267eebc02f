"""Products of tensors: sums over a shared dimension."""

from __future__ import annotations

from string import ascii_letters

from fxprune.patterns.linear import turned, weights_of_terms
from fxprune.rules.call import Named
from fxprune.rules.channels import Channels, remap
from fxprune.rules.registry import register
from fxprune.rules.shapes import broadcast_shape, with_rank


@register("matmul", "bmm", "mm", "mv", "dot", "rmatmul", kind="matmul")
def matmul(a, call):
    """(…, n, k) @ (…, k, m): k shares its units and ends."""
    first, second = call.inputs
    if call.word == "rmatmul":
        first, second = second, first
    terms, right = letters_of(len(first.shape), len(second.shape))
    grouped = by_groups(a, call, (first, second), terms, right)
    if grouped is not None:
        return grouped
    x, y = a.channels(first), turned(a, call, second)
    z = product(a, call, x, y)
    if len(x.shape) == len(y.shape) and x.sums_to_one == len(x.shape) - 1:
        z = a.averaged(z, y, len(y.shape) - 2)  # as attention does
    return z


def letters_of(*ranks):
    """A product of two stacks of matrices, of these ranks, as letters of an einsum."""
    lead = ascii_letters[: max(ranks)]
    first, second = (lead[len(lead) - max(rank - 2, 0) :] for rank in ranks)
    rows, columns = "Y" * (ranks[0] > 1), "Z" * (ranks[1] > 1)
    longer = max(first, second, key=len)
    return (first + rows + "X", second + "X" + columns), longer + rows + columns


def by_groups(a, call, operands, terms, right):
    """A stack of matrices, each for its own run of channels: (…, g, i) by (g, i, o), as the groups
    of a convolution. None where this is no such thing."""
    for value, x, own, others in zip(operands, operands[::-1], terms, terms[::-1], strict=True):
        if not isinstance(value, Named) or isinstance(x, Named):
            continue
        shared, free = ([c for c in own if (c in others) == both] for both in (True, False))
        groups, summed = ([c for c in shared if (c in right) == stays] for stays in (True, False))
        if not (groups and summed and free and set(free) <= set(right)):
            continue
        if any(value.shape[own.index(c)] == 1 for c in shared):
            continue
        places = tuple(sorted(map(others.index, shared)))
        if not a.decide(call, lambda x=x, p=places: any(axis.dims == p for axis in x.axes)):
            continue
        read, made = (sorted(map(own.index, [*groups, *cs])) for cs in (summed, free))
        if a.is_grouped(call, value, value.own_dims([own.index(c) for c in free]), x, places):
            w_in = call.tensor(value, {"in": tuple(read)})
            w_out = call.tensor(value, {"out": tuple(made)})
            a.consume(call, x, w_in, [(others.index(c), own.index(c)) for c in shared])
            for part, term in ((w_in, own), (w_out, own), (x, others)):
                for axis in part.touching(map(term.index, groups)):
                    a.hold(axis, map(term.index, groups))  # every group keeps equally many
            sizes = dict(zip(others + own, x.shape + w_out.shape, strict=True))
            shape = tuple(sizes[c] for c in right)
            rest = x.with_axes(axis for axis in x.axes if axis.dims != places)
            axes = [
                axis for part, term in ((rest, others), (w_out, own))
                for axis in placed(part, term, right, shape).axes
            ]  # fmt: skip
            return Channels(shape, tuple(sorted(axes, key=lambda axis: axis.dims)))
    return None


def placed(x, term, right, shape):
    return remap(x, {i: right.index(c) for i, c in enumerate(term) if c in right}, shape)


def product(a, call, x, y):
    first, second = len(x.shape) == 1, len(y.shape) == 1
    if first:
        x = a.view(call, x, (1, *x.shape))
    if second:
        y = a.view(call, y, (*y.shape, 1))
    lead = broadcast_shape([x.shape[:-2], y.shape[:-2]])
    rank = len(lead) + 2
    x, y = with_rank(x, rank), with_rank(y, rank)
    shape = (*lead, x.shape[-2], y.shape[-1])
    batch = [(d, d, d) for d in range(len(lead))]
    k = rank - 1
    result = a.contract(call, x, y, [(k, k - 1)], batch, {k - 1: k - 1}, {k: k}, shape)
    if first or second:
        ends = [*lead, *([] if first else [shape[-2]]), *([] if second else [shape[-1]])]
        result = a.view(call, result, tuple(ends))
    return result


@register("baddbmm", "addbmm")
def baddbmm(a, call):
    """y[b] = β c[b] + α x[b] w[b]; addbmm sums over b."""
    x, w = a.channels(call.inputs[1]), a.channels(call.inputs[2])
    if call.word == "addbmm":
        shape = x.shape[1], w.shape[2]
        y = a.contract(call, x, w, [(0, 0), (2, 1)], [], {1: 0}, {2: 1}, shape)
    else:
        y = product(a, call, x, w)
    beta, alpha = weights_of_terms(call)
    terms = [a.channels(call.inputs[0]), y]
    return a.meet(call, terms, lambda t: beta * t[0] + alpha * t[1], y.shape)


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


@register("einsum", kind="matmul")
def einsum(a, call):
    """Two operands at a time; letters that nothing after them has are summed first."""
    operands = call.inputs
    ranks = [len(v.shape) for v in operands]
    spelled = spell(call.arg(0, "equation"), ranks)
    if spelled is None:
        return a.unknown(call)
    terms, right = spelled
    grouped = by_groups(a, call, operands, terms, right) if len(operands) == 2 else None
    if grouped is not None:
        return grouped
    parts = [
        (roles(a, call, value, term, terms, right), term)
        for value, term in zip(operands, terms, strict=True)
    ]
    while len(parts) > 1:
        (x, s), (y, t), *others = parts
        later = set(right).union(*(term for _, term in others))
        x, s = sum_out(a, call, x, s, later | set(t))
        y, t = sum_out(a, call, y, t, later | set(s))
        out = "".join(c for c in dict.fromkeys(s + t) if c in later) if others else right
        parts = [(times(a, call, (x, s), (y, t), out), out), *others]
    x, term = sum_out(a, call, *parts[0], set(right))
    return remap(x, {i: right.index(c) for i, c in enumerate(term)}, call.shape)


@register("tensordot")
def tensordot(a, call):
    """y[i, j] = Σₖ x[i, k] w[k, j], over as many dimensions as ``dims`` says, or those it names."""
    dims, ranks = call.arg(2, "dims", 2), [len(v.shape) for v in call.inputs]
    if isinstance(dims, int):
        dims = list(range(-dims, 0)), list(range(dims))
    if not (isinstance(dims, (tuple, list)) and all(isinstance(d, (tuple, list)) for d in dims)):
        return a.unknown(call)
    left = list(ascii_letters[: ranks[0]])
    right = list(ascii_letters[ranks[0] : sum(ranks)])
    for i, j in zip(*dims, strict=True):
        right[j] = left[i]
    out = [c for c in left if c not in right] + [c for c in right if c not in left]
    terms = "".join(left), "".join(right)
    parts = [
        (roles(a, call, value, term, terms, "".join(out)), term)
        for value, term in zip(call.inputs, terms, strict=True)
    ]
    return times(a, call, parts[0], parts[1], "".join(out))


def spell(equation, ranks):
    """(letters of each operand, letters of the result), or None where that is not told so."""
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:  # the letters that stand once, in the order of the alphabet
        letters = left.replace(",", "").replace(".", "")
        once = sorted(c for c in set(letters) if letters.count(c) == 1)
        right = "..." * ("..." in left) + "".join(once)
    free = [c for c in ascii_letters if c not in equation]
    rest = [rank - len(t.replace("...", "")) for rank, t in zip(ranks, terms, strict=True)]
    most = "".join(free[: max(rest)])
    terms = [t.replace("...", most[len(most) - n :]) for n, t in zip(rest, terms, strict=True)]
    if any(len(set(t)) != len(t) for t in terms):
        return None
    return terms, right.replace("...", most)


def times(a, call, left, right, out):
    """The product of two operands, each with its letters, summed over those that ``out`` lacks."""
    (x, s), (y, t) = left, right
    contracted = [(s.index(c), t.index(c)) for c in s if c in t and c not in out]
    batch = [(s.index(c), t.index(c), out.index(c)) for c in s if c in t and c in out]
    free_x = {i: out.index(c) for i, c in enumerate(s) if c not in t}
    free_y = {i: out.index(c) for i, c in enumerate(t) if c not in s}
    sizes = dict(zip(s, x.shape, strict=True))
    for c, n in zip(t, y.shape, strict=True):
        sizes[c] = max(n, sizes.get(c, 1))
    return a.contract(call, x, y, contracted, batch, free_x, free_y, tuple(sizes[c] for c in out))


def roles(a, call, value, term, terms, right):
    """A parameter's letters that are summed with the other operand are read, the free ones made.
    Those that one axis of the other lies over have one, too."""
    if not isinstance(value, Named) or a.lies_together(value):
        return a.channels(value)
    others = {c for other in terms if other is not term for c in other}
    joined = next((run for run in runs_over(call, terms, term) if set(run) <= set(term)), "")
    axes = {}
    for i, c in enumerate(term):
        role = "in" if c in others and c not in right else "out" if c not in others else "bare"
        if c not in joined:
            axes[role if role not in axes else f"bare{i}"] = (i,)
    if joined:
        axes[f"bare{term.index(joined[0])}"] = tuple(sorted(map(term.index, joined)))
    return call.tensor(value, axes)


def runs_over(call, terms, term):
    """The letters of each axis over several dimensions that the other operands have."""
    for value, other in zip(call.inputs, terms, strict=True):
        if other is not term and isinstance(value, Channels):
            for axis in value.axes:
                if len(axis.dims) > 1:
                    yield [other[d] for d in axis.dims]


def sum_out(a, call, x, term, needed):
    gone = [i for i, c in enumerate(term) if c not in needed]
    return (a.reduce(call, x, gone, False) if gone else x), "".join(c for c in term if c in needed)


@register("outer", "ger", product=True)
def outer(a, call):
    """y[i, j] = x[i] w[j]."""
    x, y = (a.channels(v) for v in call.inputs)
    column = a.view(call, x, (*x.shape, 1))
    return a.meet(call, [column, y], lambda t: t[0] * t[1])
