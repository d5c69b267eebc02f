"""Tensors that the code makes: of another's shape, or of stated sizes."""

from __future__ import annotations

from fxprune.patterns.shape import given, with_sizes
from fxprune.rules.registry import register


@register("zeros_like", "ones_like", "full_like", "zero", "fill", "empty_like", "rand_like",
          "randn_like", "bernoulli")  # fmt: skip
def like(a, call):
    """A tensor of x's shape: its width follows x's. Of random ones nothing is known."""
    x = call.channels()
    value = 0.0 if call.word == "zero" else None
    if call.word == "fill":
        value = a.number_given(call, 1, "value")
    if value is not None:
        return a.overwritten(x, value)
    given = call.word == "full_like" and a.number_given(call, 1, "fill_value") is not None
    if call.word in ("zeros_like", "ones_like") or given:
        return a.meet(call, [x], lambda t: call.replay([t[0].nan_to_num()]), x.shape)
    return a.forget(x)


def is_seeded(call):
    """Whether a generator of the code's own draws: the same numbers at each call."""
    return call.node.kwargs.get("generator") is not None


@register("uniform", "exponential", "log_normal", "cauchy", "geometric")
def drawn(a, call):
    """y.uniform_(): numbers drawn in the place of those of y, of which nothing is known."""
    return a.unknown(call) if is_seeded(call) else a.forget(call.channels())


def new_normal(call, new):
    return {} if call.inputs else with_sizes(call, new.result, 2, "size")


@register("normal", resize=new_normal)
def normal(a, call):
    """y.normal_(), or numbers drawn about a mean with a deviation for each, or of stated sizes."""
    if is_seeded(call):
        return a.unknown(call)
    if call.inputs:
        return a.meet(call, [a.channels(v) for v in call.inputs])
    return a.sized_by(a.blank(call, None), given(call, 2))


def filled(first, value_at):
    """Rules for a tensor of stated sizes, from argument ``first`` on, that holds one value."""

    def sizes(call, new):
        return {} if is_seeded(call) else with_sizes(call, new.result, first, "size")

    def rule(a, call):
        """y[…] = v: all slices are alike (or drawn alike), and as many as what they meet."""
        if is_seeded(call):
            return a.rigid_result(call)
        word = call.word.removeprefix("new_")
        value = {"zeros": 0.0, "ones": 1.0}.get(word)
        if value_at is not None:
            value = a.number_given(call, value_at, "fill_value")
        y = a.blank(call, value)
        return a.sized_by(y, given(call, first))

    return sizes, rule


for names, first, value_at in (
    (("zeros", "ones", "empty", "rand", "randn"), 0, None),
    (("new_zeros", "new_ones", "new_empty"), 1, None),
    (("full",), 0, 1),
    (("new_full",), 1, 2),
):
    sizes, rule = filled(first, value_at)
    register(*names, resize=sizes, rule=rule)


def is_sized(call):
    """Whether ``x.new`` was given sizes, and not values."""
    return all(isinstance(size, int) for size in call.args[1:]) and len(call.args) > 1


of_sizes, made = filled(1, None)


@register("new", resize=lambda call, new: of_sizes(call, new) if is_sized(call) else {})
def legacy_new(a, call):
    """y of the type of x, of stated sizes or values: what new_empty and new_tensor are now."""
    return made(a, call) if is_sized(call) else a.rigid_result(call)


@register("new_tensor", "arange", "tensor", "as_tensor", "linspace", "eye")
def fresh(a, call):
    """A tensor of its own, of which only the type and device of x matter; or of the values of
    another tensor."""
    values = [a.channels(v) for v in call.inputs[call.word == "new_tensor" :]]
    if len(values) == 1 and len(values[0].shape) == len(call.node.meta["spec"].shape):
        return values[0] if call.is_floating() else a.forget(values[0])
    for x in values:
        a.freeze_all(x, f"its values leave PyTorch through {call.name}", call)
    return a.rigid_result(call)
