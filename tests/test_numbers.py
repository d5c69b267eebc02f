"""Numbers that the code computes from widths, in every way that Python offers: right as they are,
an attribute to set, or code to write anew; under all three oracles."""

from __future__ import annotations

import argparse
import dataclasses
import math
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, check
from .test_constructs import Net, image, kept


def conv_net(forward, **more):
    """silu(conv) with eight channels, ``forward(s, y)`` on them, and a layer that reads it."""

    def run(s, x):
        return s.b(forward(s, F.silu(s.a(x))))

    net = Net(run, a=nn.Conv2d(3, 8, 3, padding=1), b=nn.Conv2d(8, 4, 1))
    vars(net).update(more)
    return net


def halved_twice(y, bound):
    return y[:, :bound].repeat(1, 2, 1, 1)


@pytest.mark.parametrize("forward", [
    lambda s, y: y / y.shape[1],
    lambda s, y: y / math.sqrt(y.shape[1]),
    lambda s, y: y * y.shape[1] ** -0.5,
    lambda s, y: y * float(y.shape[1]),
    lambda s, y: y * round(y.shape[1] / 3),
    lambda s, y: y * torch.tensor(y.shape[1]),
    lambda s, y: y / y[0].numel(),
    lambda s, y: (y.transpose(0, 1) * len(y.transpose(0, 1))).transpose(0, 1),
    lambda s, y: y * 2 if y.shape[1] > 6 else y,
    lambda s, y: y * min(y.size(1), 5),
    lambda s, y: halved_twice(y, int(y.shape[1] * 0.5)),
    lambda s, y: torch.cat([y[:, :4], y.new_zeros(y.shape[0], y.shape[1] - 4, 8, 8)], 1),
])  # fmt: skip
def test_a_number_made_of_a_width_keeps_the_masked_model_s_value(forward):
    plan, small = check(conv_net(forward), image())
    assert small.a.out_channels == 4
    assert "" in plan.code and not plan.attributes


@pytest.mark.parametrize("forward", [
    lambda s, y: halved_twice(y, math.floor(y.shape[1] / 2)),
    lambda s, y: halved_twice(y, y.shape[1] // 2),
])  # fmt: skip
def test_a_half_that_loses_its_half_is_half_of_what_is_left(forward):
    plan, small = check(conv_net(forward), image())
    assert small.a.out_channels == 4 and not plan.code and not plan.attributes


def literal_assertion(s, y):
    assert y.shape[1] == 8
    return y


def attribute_assertion(s, y):
    assert y.shape[1] == s.width
    return y


def shape_assertion(s, y):
    if y.shape != (y.shape[0], s.width, 8, 8):
        raise ValueError(y.shape)
    return y


def test_an_assertion_on_a_literal_is_left_out():
    plan, small = check(conv_net(literal_assertion), image())
    assert small.a.out_channels == 4 and "" in plan.code


@pytest.mark.parametrize("forward", [attribute_assertion, shape_assertion])
def test_an_attribute_that_a_width_is_compared_with_is_set(forward):
    plan, small = check(conv_net(forward, width=8), image())
    assert plan.attributes == {"width": 4} and small.width == 4 and not plan.code


@pytest.mark.parametrize("triple", [lambda width: width * 3, lambda width: 3 * width])
def test_an_attribute_of_which_a_size_is_a_multiple_is_set(triple):
    """As MaxViT's attention has it, whose one head loses a share of its width."""

    def run(s, x):
        y = s.qkv(x).view(x.shape[0], -1, s.heads, triple(s.width)).transpose(1, 2)
        q, k, v = y.chunk(3, 3)
        y = (q @ k.transpose(2, 3) * 0.4).softmax(-1) @ v
        return s.out(y.transpose(1, 2).flatten(2))

    net = Net(run, qkv=nn.Linear(6, 24), out=nn.Linear(8, 6), heads=1, width=8)
    plan, small = check(net, torch.randn(2, 5, 6, dtype=torch.float64))
    assert small.width == 4 and not plan.code


@pytest.mark.parametrize("dims", [(8, 1), [4, 2]], ids=str)
def test_an_item_of_a_sequence_is_set(dims):
    def forward(s, y):
        return y.view(y.shape[0], s.dims[0], s.dims[1], 8, 8).flatten(1, 2)

    plan, small = check(conv_net(forward, dims=dims), image())
    assert type(small.dims) is type(dims) and math.prod(small.dims) == 4 and not plan.code


def test_an_attribute_of_a_config_object_is_set():
    def forward(s, y):
        return y.view(y.shape[0], s.config.width, -1).view(y.shape[0], -1, 8, 8)

    config = types.SimpleNamespace(width=8, other=3)
    plan, small = check(conv_net(forward, config=config), image())
    assert plan.attributes == {"config.width": 4}
    assert (config.width, small.config.width, small.config.other) == (8, 4, 3)


class Sizes:
    def __init__(self):
        self.width, self.parts = 8, (2, 4)


@dataclasses.dataclass(frozen=True)
class Fixed:
    width: int = 8
    parts: tuple[int, int] = (2, 4)


@pytest.mark.parametrize("args", [
    Sizes(), argparse.Namespace(width=8, parts=(2, 4)), Fixed(),
], ids=lambda args: type(args).__name__)  # fmt: skip
def test_a_configuration_goes_by_any_name(args):
    def forward(s, y):
        y = y.view(len(y), *s.args.parts, 8, 8).flatten(1, 2)
        return y.view(y.shape[0], s.args.width, -1).view(y.shape[0], -1, 8, 8)

    plan, small = check(conv_net(forward, args=args), image())
    if isinstance(args, Fixed):  # nothing can set it
        assert plan.code and small.args == args
    else:
        assert plan.attributes.keys() == {"args.width", "args.parts"} and not plan.code
        assert (args.width, small.args.width, math.prod(small.args.parts)) == (8, 4, 4)


@pytest.mark.parametrize("layer", ["b", "a"])
def test_a_layer_s_own_size_needs_no_new_code(layer):
    def forward(s, y):
        width = s.b.in_channels if layer == "b" else s.a.out_channels
        return y.reshape(y.shape[0], width, -1).view(y.shape)

    plan, small = check(conv_net(forward), image())
    assert small.a.out_channels == 4 and not plan.code and not plan.attributes


def test_an_attribute_of_a_layer_that_is_no_width_of_its_own_is_not_set():
    """The pool's window has as many steps as there are channels, by chance."""

    def forward(s, y):
        return s.pool(y.reshape(y.shape[0], s.pool.kernel_size, 8, 8))[:, :, :8, :8]

    net = conv_net(forward)
    net.pool = nn.AvgPool2d(8, 1, 4)
    plan, small = check(net, image())
    assert small.a.out_channels == 4 and small.pool.kernel_size == 8
    assert not plan.attributes and "" in plan.code


@pytest.mark.parametrize("make", [
    lambda s, y: torch.zeros(1, s.b.in_channels, 1, 1),
    lambda s, y: torch.full((y.shape[1], 1, 1), 0.5),
    lambda s, y: y.new_ones(y.shape),
    lambda s, y: torch.ones(8, 1, 1),
])  # fmt: skip
def test_a_filled_tensor_has_the_width_of_what_it_meets(make):
    _, small = check(conv_net(lambda s, y: y + make(s, y).to(y)), image())
    assert small.a.out_channels == 4


def test_an_attribute_that_also_counts_something_else_is_not_set():
    """``width`` sizes a view and scales the result: the view is written anew, the scale is not."""

    def forward(s, y):
        return y.view(y.shape[0], s.width, -1).view(y.shape[0], -1, 8, 8) * s.width

    plan, small = check(conv_net(forward, width=8), image())
    assert small.a.out_channels == 4 and "mul(8)" in plan.code[""].source


class TakesAnything(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, *more, scale=1.0, **flags):
        y = F.silu(self.a(x)).view(-1, 8)
        for other in more:
            y = y * other
        return self.b(y * flags.get("gate", scale))


@pytest.mark.usefixtures("from_the_graph")
def test_new_code_takes_any_number_of_arguments():
    x, gate = (torch.randn(2, n, dtype=torch.float64) for n in (6, 1))
    model = awake(TakesAnything())
    inputs = {"x": x, "gate": gate}
    plan = fxprune.plan(model, inputs)
    small = plan.apply(model)
    assert kept(plan, "a") == 4 and "**flags" in plan.code[""].source
    assert torch.allclose(plan.mask(model)(x, gate=gate * 2), small(x, gate=gate * 2))
    with pytest.raises(fxprune.PruningError, match="flags"):
        small(x)
    with pytest.raises(fxprune.PruningError, match="more"):
        small(x, gate, gate=gate)


def test_the_length_of_a_tensor_is_one_of_its_sizes():
    """``len`` gives plain integers; written into new code they would be those of the example."""

    def forward(s, x):
        y = torch.sigmoid(s.a(x)).view(len(x), 8, 64)
        return s.b(y.transpose(1, 2).reshape(len(y) * 64, -1)).view(len(x), -1)

    before = len
    plan, small = check(Net(forward, a=nn.Conv2d(3, 8, 1), b=nn.Linear(8, 2)), image())
    assert len is before
    assert plan.code  # the 8 is written anew, the lengths are not
    assert torch.equal(small(image(batch=5)), fxprune.trace(small, image())(image(batch=5)))


@pytest.mark.parametrize("number", [np.sqrt(8), np.float32(1.5), np.int64(2)], ids=repr)
def test_numbers_of_numpy_are_numbers(number):
    plan, _ = check(conv_net(lambda s, y: y * number), image())
    assert kept(plan, "a") == 4


def heads_net(turn):
    """Channels as four heads of 16, of which ``turn`` turns the first eight."""

    def forward(s, x):
        y = s.a(x).view(*x.shape[:-1], 4, 16)
        turned = torch.cat([turn(y[..., :8]), y[..., 8:]], -1)
        return s.b(turned.flatten(-2))

    return Net(forward, a=nn.Linear(6, 64), b=nn.Linear(64, 4))


def test_a_part_of_every_head_is_as_wide_as_what_is_left_of_it_in_each():
    torch.manual_seed(0)
    net = heads_net(torch.sigmoid)
    plan, small = check(net, torch.randn(2, 5, 6, dtype=torch.float64), attention="head_dim")
    rows = plan.kept["a.weight"][0].reshape(4, -1)
    places = rows % 16
    assert (places != places[0]).any()  # other slices in each head, but as many of each part
    assert ((places < 8).sum(1) == 4).all() and small.a.out_features == 32


def test_a_part_of_every_head_that_meets_a_fixed_table_stays_and_the_line_is_named():
    torch.manual_seed(0)
    table = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    net = heads_net(lambda part: part * table)
    plan, _ = check(net, torch.randn(2, 5, 6, dtype=torch.float64), attention="head_dim",
                    shrinks=False)  # fmt: skip
    assert "a" in dict(plan.skipped), plan


class SamePad(nn.Conv2d):
    """A convolution whose own forward goes by its attributes, as EfficientNet's often does."""

    def forward(self, x):
        x = F.pad(x, (1, 1, 1, 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class SamePadTransposed(nn.ConvTranspose2d):
    def forward(self, x):
        return F.conv_transpose2d(x, self.weight, self.bias, groups=self.groups)


@pytest.mark.parametrize(("groups", "width", "left"), [(8, 8, 4), (2, 8, 2), (4, 4, 2), (4, 16, 2)])
@pytest.mark.parametrize("kind", [SamePad, SamePadTransposed])
def test_groups_of_a_convolution_by_function_follow_what_is_left(kind, groups, width, left):
    torch.manual_seed(0)

    def forward(s, x):
        return s.b(s.m(s.a(x).sigmoid()).sigmoid())

    net = Net(forward, a=nn.Conv2d(3, 8, 3), m=kind(8, width, 3, groups=groups),
              b=nn.Conv2d(width, 4, 1))  # fmt: skip
    _, small = check(net, image())
    depthwise = groups == 8 or (groups, width) == (4, 4)
    assert small.m.groups == (left if depthwise else groups), small


@pytest.mark.parametrize("chunk", [
    lambda y: y.chunk(3, 1), lambda y: y.chunk(dim=1, chunks=3),
    lambda y: torch.chunk(y, 3, dim=1), lambda y: torch.chunk(input=y, chunks=3, dim=1),
])  # fmt: skip
def test_chunks_of_sizes_that_chunk_would_not_compute_are_split(chunk):
    """Of 14 channels chunk makes 5, 5 and 4; of 7 it would make 3, 3 and 1, not 3, 2 and 2."""

    def forward(s, x):
        a, b, c = chunk(F.silu(s.a(x)))
        return s.out(torch.cat([s.first(a), s.second(b), c], 1))

    net = Net(forward, a=nn.Conv2d(3, 14, 1), first=nn.Conv2d(5, 5, 1, groups=5),
              second=nn.Conv2d(5, 5, 1, groups=5), out=nn.Conv2d(14, 4, 1))  # fmt: skip
    net.b = net.out
    plan, small = check(net, image())
    assert [small.first.in_channels, small.second.in_channels] == [3, 2]
    assert small.a.out_channels == 7 and "split" in str(plan.code[""])


@pytest.mark.parametrize("forward", [
    lambda s, y: y.reshape(2, +y.shape[1], 64).view(2, -1, 8, 8),
    lambda s, y: y.reshape(2, ~(-y.shape[1] - 1), 64).view(2, -1, 8, 8),
    lambda s, y: y.reshape(2, y.shape[1].real, 64).view(2, -1, 8, 8),
    lambda s, y: y.reshape(2, np.prod(y.shape[1:])).view(2, -1, 8, 8),
    lambda s, y: y.reshape(2, np.prod(y.shape[1:]).item()).view(2, -1, 8, 8),
])  # fmt: skip
def test_python_s_and_numpy_s_ways_to_hand_a_size_on_keep_its_origin(forward):
    plan, small = check(conv_net(forward), image())
    assert small.a.out_channels == 4 and not plan.code


def test_a_product_with_1_and_one_with_1_0_are_two_numbers():
    def forward(s, y):
        return (y / (y.shape[1] * 1.0)).view(-1, y.shape[1] * 1, 8, 8)

    _, small = check(conv_net(forward), image())
    assert small.a.out_channels == 4


def test_code_that_would_divide_by_zero_at_the_new_width_keeps_the_old_one():
    def forward(s, y):
        return y.reshape(2, 32 // (y.shape[1] - 4), -1).reshape(y.shape)

    plan, _ = check(conv_net(forward), image(), shrinks=False)
    assert "cannot compute its sizes from what is left" in dict(plan.skipped)["a"]


def test_a_question_that_would_be_an_error_at_the_new_width_has_another_answer():
    def forward(s, y):
        return y if y.shape[1] // (y.shape[1] - 4) > 1 else y + 1

    plan, small = check(conv_net(forward), image())
    assert small.a.out_channels == 4 and list(plan.code) == [""]


def test_an_index_of_numpy_is_followed():
    at = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    plan, _ = check(conv_net(lambda s, y: y[:, at]), image(), shrinks=False)
    assert "getitem" in dict(plan.skipped)["a"]


@pytest.mark.parametrize("reshape", [
    lambda y: torch.Tensor.view(y, -1, 8 * 64),
    lambda y: getattr(y, "view")(-1, 8 * 64),  # noqa: B009
])  # fmt: skip
def test_methods_that_are_called_in_roundabout_ways_get_their_new_sizes(reshape):
    class Roundabout(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(512, 4)

        def forward(self, x):
            return self.b(reshape(torch.sigmoid(self.a(x))))

    plan, small = check(Roundabout(), image())
    assert small.a.out_channels == 4


def test_numbers_that_are_traced_have_no_more_than_python_s_own():
    model = conv_net(lambda s, y: y * (2 if hasattr(y.shape[1], "item") else 1)).eval().float()
    x = image().float()
    assert torch.equal(fxprune.trace(model, x)(x), model(x))


@pytest.mark.parametrize("asks, left", [(False, 4), (True, 8)])
def test_a_length_that_is_asked_past_len_is_known_as_that_of_the_example(asks, left):
    """New code would hold the batch of the example; a patched width does not need it."""

    def forward(s, x):
        y = torch.sigmoid(s.a(x))
        batch = y.__len__() if asks else -1
        return s.b(y.reshape(batch, y.t().__len__() // 4, 4).flatten(1))

    model = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    plan, small = check(model, torch.randn(3, 6, dtype=torch.float64), shrinks=not asks)
    assert small.a.out_features == left, plan
    assert not asks or "and inputs may have others" in dict(plan.skipped)["a"]
