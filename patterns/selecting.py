"""Slices picked along one dimension: select, narrow, index_select."""

from __future__ import annotations

from fxprune.registry import register


def new_select(call, new):
    dim = call.arg(1, "dim") % len(call.channels().shape)
    keep = new.keep(dim)
    at = call.recorded(2, "index")
    return {} if keep is None else {(2, "index"): keep.before(at % len(keep))}


@register("select", resize=new_select)
def select(a, call):
    """y = x[…, i, …]: one slice, whose dimension goes."""
    x, dim = call.channels(), call.arg(1, "dim") % len(call.channels().shape)
    at = call.arg(2, "index")
    a.keep_rows(x, dim, at)
    return a.move(call, x, lambda t: t.select(dim, at), touched=[dim])


def new_narrow(call, new):
    dim = call.arg(1, "dim") % len(call.channels().shape)
    keep = new.keep(dim)
    if keep is None:
        return {}
    start = call.recorded(2, "start") % len(keep)
    return {(2, "start"): keep.before(start), (3, "length"): new.result[dim]}


@register("narrow", resize=new_narrow)
def narrow(a, call):
    """y[i] = x[start + i]."""
    x, dim = call.channels(), call.arg(1, "dim") % len(call.channels().shape)
    start = call.arg(2, "start") % x.shape[dim]
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
    x, dim = call.channels(), call.arg(1, "dim") % len(call.channels().shape)
    at = a.positions(call, call.arg(2, "index"), x, dim)
    if at is None:
        reason = f"positions that are data are read from it in {call.name}"
        x = a.freeze_dims(x, [dim], reason, call)
        at = a.positions(call, call.arg(2, "index"), x, dim)
    return a.move(call, x, lambda t: t.index_select(dim, at), touched=[dim])


@register("masked_select", "nonzero", "argmax", "argmin", "argsort", "sort", "topk", "multinomial",
    "bincount", "unique")  # fmt: skip
def data_dependent(a, call):
    """Positions or an order come out: along channels these would mean something else."""
    return a.unknown(call, f"{call.word} depends on which channels there are")
