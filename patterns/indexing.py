"""Reading parts of a tensor by position."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import fx

from fxprune.rules.call import Named
from fxprune.rules.channels import Channels, remap
from fxprune.rules.ops import op_name
from fxprune.rules.registry import register
from fxprune.tracing.trace import after_write


def per_dim(x, index):
    """(place in the index or None, dimension of x or None, item) for each item and dimension."""
    index = as_tuple(index)
    used = sum(1 for item in index if item is not None and item is not Ellipsis)
    result: list = []
    dim = 0
    for place, item in enumerate(index):
        if item is Ellipsis:
            skip = len(x.shape) - used
            result += [(None, dim + i, slice(None)) for i in range(skip)]
            dim += skip
        elif item is None:
            result.append((place, None, None))
        else:
            result.append((place, dim, item))
            dim += 1
    return result + [(None, d, slice(None)) for d in range(dim, len(x.shape))]


def is_data(item):
    """Whether positions come from a tensor or a list, and not from numbers in the code."""
    parts = (item.start, item.stop, item.step) if isinstance(item, slice) else (item,)
    return any(isinstance(part, (Channels, Named, list)) for part in parts)


def is_read_in_part(a, item):
    """Whether a slice begins or ends where the input says so: other inputs read more."""
    return isinstance(item, slice) and any(map(a.varies, (item.start, item.stop)))


def is_full(item):
    return isinstance(item, slice) and item == slice(None)


def place_of(at, keep):
    """Where a slice begins or ends among what is kept: counted from the end where it was, if
    anything is kept behind it."""
    if at is None or not -len(keep) < at < len(keep):
        return at
    place, left = keep.before(at % len(keep)), keep.before(len(keep))
    return place if at >= 0 else place - left or left


def place_of_one(at, keep):
    """Where one slice is among what is kept. It stays, but where its sizes are all that is read:
    then any will do."""
    return min(keep.before(at % len(keep)), keep.before(len(keep)) - 1)


def new_index(call, new):
    """Slices and positions along channels, by the channels that are left."""
    x, index = call.channels(), call.arg(1, "index")
    items = list(as_tuple(index))
    changed = False
    for place, dim, item in per_dim(x, call.recorded(1, "index")):
        if dim is None or is_full(item):
            continue
        keep = new.keep(dim)
        if keep is None:  # a number made of widths, or of an attribute, is another now
            mine = items[place]
            if not isinstance(item, (int, slice)) or is_data(mine) or mine == item:
                continue
        elif isinstance(item, slice) and item.step in (None, 1):
            item = slice(place_of(item.start, keep), place_of(item.stop, keep), item.step)
            left = range(keep.before(len(keep)))
            if isinstance(items[place], slice) and left[items[place]] == left[item]:
                continue  # however the code puts it
        elif isinstance(item, slice):
            item = stepped([keep.before(i) for i in range(len(keep))[item] if keep[i]])
            every = list(range(keep.before(len(keep))))
            if isinstance(items[place], slice) and every[items[place]] == at_of(item, every):
                continue
            if isinstance(item, list) and not may_be_a_list(call, items, place):
                keep.refuse("what is left of it is not evenly spaced")
        elif isinstance(item, int):
            item = place_of_one(item, keep)
        elif isinstance(item, list) and all(isinstance(i, int) for i in item):
            at = [i % len(keep) for i in item]
            item = [keep.before(i) for i in at if keep[i]]
        else:
            continue
        changed, items[place] = True, item
    if not changed:
        return {}
    alone = not isinstance(index, tuple) and as_tuple(index)[0] is index
    return {(1, "index"): items[0] if alone else tuple(items)}


def may_be_a_list(call, items, place):
    """Whether a list means what a slice means there: it is a copy, and goes with other lists and
    numbers in pairs."""
    alone = all(item is None or item is Ellipsis or isinstance(item, slice)
                for i, item in enumerate(items) if i != place)  # fmt: skip
    return alone and (call.word == "setitem" or not is_written(call.node))


VIEWS = frozenset((
    "getitem", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "T", "mT",
    "swapaxes", "movedim", "select", "narrow", "squeeze", "unsqueeze", "expand", "chunk", "split",
    "unbind", "detach", "data", "view_as",
))  # fmt: skip


def is_written(node):
    """Whether its memory is written to later on."""
    for user in node.users:
        name = op_name(user.target) if user.op != "call_module" else ""
        in_place = user.op == "call_method" and str(user.target).endswith("_")
        if user.target is after_write or ((in_place or name == "setitem") and user.args[0] is node):
            return True
        if name in VIEWS and is_written(user):
            return True
    return False


def stepped(positions):
    """Positions as a slice, where they are evenly spaced."""
    steps = {b - a for a, b in pairwise(positions)} or {1}
    if len(steps) > 1:
        return positions
    first, last = (positions[0], positions[-1]) if positions else (0, -1)
    return slice(first, last + 1, steps.pop())


def at_of(item, every):
    return every[item] if isinstance(item, slice) else item


def is_mask(node):
    spec = node.meta["spec"]
    return hasattr(spec, "dtype") and spec.dtype in (torch.bool, torch.uint8)


def as_tuple(index):
    """An index by dimensions; in a list of slices PyTorch sees one, too."""
    several = isinstance(index, list) and any(isinstance(i, (slice, type(None))) for i in index)
    return tuple(index) if several or isinstance(index, tuple) else (index,)


def masked_dims(call):
    """Over how many leading dimensions a mask picks, and nothing else does; 0 where none."""
    index = as_tuple(call.node.args[1])
    if not index or not isinstance(index[0], fx.Node) or not is_mask(index[0]):
        return 0
    alone = all(item is Ellipsis or is_full(item) for item in index[1:])
    return len(index[0].meta["spec"].shape) if alone else 0


def picked_dims(call):
    """The dimensions that a mask and numbers beside it pick from, where all others are read whole:
    the positions that they pick come to stand there. None where the index is another."""
    dims: list[int] = []
    masked, at, over = False, 0, False
    for item in as_tuple(call.node.args[1]):
        mask = isinstance(item, fx.Node) and is_mask(item)
        if mask or type(item) is int:
            count = len(item.meta["spec"].shape) if mask else 1
            if over or not count:
                return None
            dims += range(at, at + count)
            masked, at = masked or mask, at + count
        elif is_full(item) or (item is Ellipsis and dims):
            over, at = bool(dims), at + 1
        else:
            return None
    return dims if masked else None


def where_masked(a, call, x, dims, shape):
    """(dimensions before them, picked positions, those behind)."""
    reason = f"positions that are data are read from it in {call.name}"
    x = a.freeze_dims(x, dims, reason, call)
    less = len(dims) - 1
    moved = {d: d - (less if d > dims[0] else 0) for d in range(len(x.shape)) if d not in dims}
    return remap(x, moved, shape)


@register("getitem", kind="getitem", resize=new_index)
def getitem(a, call):
    """Slices and constant indices run on the labels; an index that is data freezes them."""
    dims = picked_dims(call)
    if dims is not None:
        return where_masked(a, call, call.channels(), dims, call.shape)
    masks = [n for n in call.node.all_input_nodes[1:] if is_mask(n)]
    if masks:
        return a.unknown(call, f"positions that are data are read from it in {call.name}")
    x = call.channels()
    parts = per_dim(x, call.node.args[1])
    x = as_far_as(a, call, x, [d for _, d, item in parts if is_read_in_part(a, item)])
    return pick(a, call, x, call.arg(1, "index"), call.shape)


def as_far_as(a, call, x, dims):
    """``x``, of which the input's sizes say how much is read along ``dims``."""
    reason = f"how much of it {call.name} reads depends on the input"
    return a.freeze_dims(x, dims, reason, call)


def anywhere(a, call, x, dim):
    """``x`` where a tensor says which slices along ``dim`` are read."""
    reason = f"positions that are data are read from it in {call.name}"
    return a.freeze_dims(x, [dim], reason, call)


def pick(a, call, x, index, shape):
    items, touched = [], []
    for _, dim, item in per_dim(x, index):
        if isinstance(item, (list, np.ndarray)):
            item = torch.as_tensor(item)
        if isinstance(item, (Channels, Named)):
            at = a.positions(call, item, x, dim)
            if at is None:  # any slice may be read, whatever happens along other dimensions
                x = anywhere(a, call, x, dim)
                at = a.positions(call, item, x, dim)
            item = at
        if isinstance(item, slice) and is_data(item):
            x = anywhere(a, call, x, dim)
        if isinstance(item, slice) and x.axis(dim) is None:
            item = slice(None)  # no channels there: which positions, even none, does not matter
        elif isinstance(item, slice) and not range(x.shape[dim])[item]:
            item = slice(0, 1)  # nothing of it is left, but of what lies beside it
        if dim is not None and not is_full(item):
            a.keep_rows(x, dim, several=isinstance(item, slice))
            touched.append(dim)
        items.append(item)
    picked = [
        dim for (_, dim, _), item in zip(per_dim(x, index), items, strict=True)
        if isinstance(item, torch.Tensor)
    ]  # fmt: skip
    look_up(a, call, x, picked)
    return a.move(call, x, lambda t: t[tuple(items)], shape, touched=touched)


def look_up(a, call, x, dims):
    """Where rows of a parameter are picked by data, what is in them is made there, as in an
    embedding."""
    if dims and isinstance(call.inputs[0], Named):
        for axis in x.axes:
            if set(axis.dims).isdisjoint(dims):
                a.makes(axis)
