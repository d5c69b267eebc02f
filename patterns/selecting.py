"""Slices picked along one dimension: select, narrow, index_select."""

from __future__ import annotations

from fxprune.patterns.indexing import anywhere, as_far_as, look_up, place_of_one
from fxprune.rules.call import Named
from fxprune.rules.channels import Channels
from fxprune.rules.registry import register


def new_select(call, new):
    dim = call.arg(1, "dim") % len(call.channels().shape)
    keep = new.keep(dim)
    at = call.recorded(2, "index")
    if keep is None or not isinstance(at, int):
        return {}
    return {(2, "index"): place_of_one(at, keep)}


@register("select", resize=new_select)
def select(a, call):
    """y = x[…, i, …]: one slice, whose dimension goes."""
    x, dim = call.channels(), call.arg(1, "dim") % len(call.channels().shape)
    at = call.arg(2, "index")
    if isinstance(at, (Channels, Named)):
        x, at = anywhere(a, call, x, dim), 0
    a.keep_rows(x, dim)
    return a.move(call, x, lambda t: t.select(dim, at), touched=[dim])


def new_narrow(call, new):
    dim = call.arg(1, "dim") % len(call.channels().shape)
    keep = new.keep(dim)
    start = call.recorded(2, "start")
    if keep is None or not isinstance(start, int):
        return {}
    start %= len(keep)
    return {(2, "start"): keep.before(start), (3, "length"): new.result[dim]}


@register("narrow", resize=new_narrow)
def narrow(a, call):
    """y[i] = x[start + i]."""
    x, dim = call.channels(), call.arg(1, "dim") % len(call.channels().shape)
    start = call.arg(2, "start")
    if isinstance(start, (Channels, Named)):
        x, start = anywhere(a, call, x, dim), 0
    if any(map(a.varies, (*call.node.args[2:], *call.node.kwargs.values()))):
        x = as_far_as(a, call, x, [dim])
    start %= x.shape[dim]
    return a.move(call, x, lambda t: t.narrow(dim, start, call.shape[dim]), touched=[dim])


@register("slice")
def aten_slice(a, call):
    """y[i] = x[start + i · step]."""
    x, dim = call.channels(), call.arg(1, "dim", 0) % len(call.channels().shape)
    bounds = slice(call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1))
    if x.axis(dim) is not None and bounds.indices(x.shape[dim]) != (0, x.shape[dim], 1):
        return a.unknown(call)  # beneath a call, where no code is there to take new bounds
    return a.move(call, x, lambda t: t[(slice(None),) * dim + (bounds,)], touched=[dim])


@register("index_select")
def index_select(a, call):
    """y[i] = x[index[i]]."""
    x, dim = call.channels(), call.arg(1, "dim")
    if not x.shape:
        return a.unknown(call)
    dim %= len(x.shape)
    at = a.positions(call, call.arg(2, "index"), x, dim)
    if at is None:
        x = anywhere(a, call, x, dim)
        at = a.positions(call, call.arg(2, "index"), x, dim)
    look_up(a, call, x, [dim])
    return a.move(call, x, lambda t: t.index_select(dim, at), touched=[dim])


@register("gather", "take_along_dim")
def gather(a, call):
    """y[i, j] = x[index[i, j], j]; the index says so along all dimensions."""
    at = (2, "index") if call.word == "gather" else (1, "indices")
    dim = call.arg(1, "dim") if call.word == "gather" else call.arg(2, "dim")
    x, index = call.channels(), call.arg(*at)
    if not isinstance(dim, int) or not isinstance(index, Channels) or not x.shape:
        return a.unknown(call)
    reason = f"positions that are data are read from it in {call.name}"
    met = beside(a, call, [x, index], dim, reason, short=call.word == "gather")
    return Channels(call.shape, met.axes)


def beside(a, call, parts, dim, reason, *, short=True):
    """What stands beside the first of ``parts`` along all dimensions but ``dim``; where it may be
    ``short`` it may end before it there."""
    shape = parts[0].shape
    ends = {d for t in parts for d, n in enumerate(t.shape) if n != shape[d]} if short else set()
    apart = a.decide(call, lambda: {dim % len(shape), *ends})
    parts = [a.freeze_dims(t, apart, reason, call) for t in parts]
    return a.meet(call, [Channels(without(t, apart), t.axes) for t in parts], lambda t: t[0])


def without(x, dims):
    """Its shape, with one slice along ``dims``."""
    return tuple(1 if d in dims else n for d, n in enumerate(x.shape))


# Where the dimension stands among the arguments; the last one unless it is given.
DIM_AT = {
    "sort": 1, "argsort": 1, "mode": 1, "argmax": 1, "argmin": 1, "cummax": 1, "cummin": 1,
    "topk": 2, "kthvalue": 2,
}  # fmt: skip


@register(*DIM_AT)
def ordered(a, call):
    """Slices of one dimension are put in order, or some of them picked, by their values."""
    given = call.arg(DIM_AT[call.word], "dim", None if call.word in ("argmax", "argmin") else -1)
    x = call.channels()
    if isinstance(given, bool) or not isinstance(given, int) or not x.shape:
        return data_dependent(a, call)
    dim = given % len(x.shape)
    x = a.freeze_dims(x, [dim], f"{call.word} depends on which channels there are", call)
    results = call.spec if isinstance(call.spec, (tuple, list)) else (call.spec,)
    if len(results[0].shape) < len(x.shape):
        values = a.levelled(x, a.reduce(call, x, [dim], False))
    else:
        values = Channels(call.shape if results[0] is call.spec else call.shapes[0], x.axes)
    if results[0] is call.spec:  # positions alone
        return a.forget(values) if call.word.startswith("arg") else values
    return values, *(a.forget(values) for _ in results[1:])


@register("one_hot")
def one_hot(a, call):
    """y[…, k] is whether x[…] is k: the slices of x, each with a row of flags."""
    x = call.channels()
    return a.forget(Channels(call.shape, x.axes))


@register("masked_select", "nonzero", "multinomial", "bincount", "unique")
def data_dependent(a, call):
    """Positions or an order come out: along channels these would mean something else."""
    return a.unknown(call, f"{call.word} depends on which channels there are")
