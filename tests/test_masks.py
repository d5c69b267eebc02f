"""fxprune.masks: the same masks as PyTorch's own methods, and what masks are held to."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as theirs

from fxprune import masks
from fxprune.errors import SettingError
from fxprune.parametrized.mask import mask_of

SHAPES = st.sampled_from([(8,), (6, 4), (4, 3, 3, 3), (5, 1, 2), (1, 7)])
AMOUNTS = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0]), st.integers(0, 4))
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


class Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(tensor.clone())

    def forward(self):
        return self.weight * 2


def values(shape, dtype, seed, ties):
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=g, dtype=torch.float64)
    return ((t * 2).round() if ties else t).to(dtype)


def step(kind, amount, dim, n, seed):
    """(ours, theirs) of one method on a module."""
    if kind == "l1":
        return (lambda m: masks.l1_unstructured(m, "weight", amount),
                lambda m: theirs.l1_unstructured(m, "weight", amount))  # fmt: skip
    if kind == "random":
        return (lambda m: masks.random_unstructured(m, "weight", amount),
                lambda m: theirs.random_unstructured(m, "weight", amount))  # fmt: skip
    if kind == "ln":
        return (lambda m: masks.ln_structured(m, "weight", amount, n, dim),
                lambda m: theirs.ln_structured(m, "weight", amount, n, dim))  # fmt: skip
    if kind == "rows":
        return (lambda m: masks.random_structured(m, "weight", amount, dim),
                lambda m: theirs.random_structured(m, "weight", amount, dim))  # fmt: skip
    if kind == "identity":
        return (lambda m: masks.identity(m, "weight"), lambda m: theirs.identity(m, "weight"))

    def mask(m):
        return values(m.weight.shape, torch.float64, seed, False) > 0

    return (lambda m: masks.custom_from_mask(m, "weight", mask(m)),
            lambda m: theirs.custom_from_mask(m, "weight", mask(m)))  # fmt: skip


KINDS = st.sampled_from(["l1", "random", "ln", "rows", "identity", "custom"])
STEPS = st.lists(st.tuples(KINDS, AMOUNTS, st.integers(-4, 3),
                           st.sampled_from([1, 2, 3, 0.5, float("inf"), -float("inf"), "fro"])),
                 min_size=1, max_size=3)  # fmt: skip


@settings(max_examples=300)
@given(SHAPES, DTYPES, st.booleans(), st.integers(0, 99), STEPS)
def test_stacked_methods_mask_what_pytorch_masks(shape, dtype, ties, seed, steps):
    t = values(shape, dtype, seed, ties)
    mine, other = Holder(t), Holder(t)
    for i, (kind, amount, dim, n) in enumerate(steps):
        if kind in ("ln", "rows") and len(shape) < 2:
            return  # an error here always, there with the first mask only
        ours, pytorch = step(kind, amount, dim, n, seed)
        failed = []
        for call, module in ((ours, mine), (pytorch, other)):
            torch.manual_seed(seed + i)
            before = copy.deepcopy(module.state_dict())
            try:
                call(module)
                failed.append(None)
            except (ValueError, TypeError, IndexError, RuntimeError) as error:
                failed.append(type(error))
                if call is ours:  # it is as it was
                    after = module.state_dict()
                    assert before.keys() == after.keys()
                    assert all(torch.equal(before[k], after[k]) for k in before)
        if failed[1] is not None:
            assert failed[0] is not None or kind in ("ln", "rows")  # where nothing is left of it
            return
        assert failed[0] is None, failed
        assert torch.equal(mask_of(mine, "weight"), other.weight_mask != 0), (kind, amount)
        assert torch.equal(mine.weight, other.weight)


@settings(max_examples=200)
@given(st.lists(SHAPES, min_size=1, max_size=3), AMOUNTS, st.sampled_from(["l1", "random"]),
       st.integers(0, 99), st.booleans())  # fmt: skip
def test_global_masks_are_pytorchs(shapes, amount, method, seed, twice):
    tensors = [values(s, torch.float32, seed + i, False) for i, s in enumerate(shapes)]
    ours, other = ([Holder(t) for t in tensors] for _ in range(2))
    kind = {"l1": theirs.L1Unstructured, "random": theirs.RandomUnstructured}[method]
    for _ in range(1 + twice):
        torch.manual_seed(seed)
        masks.global_unstructured([(m, "weight") for m in ours], amount, method)
        torch.manual_seed(seed)
        theirs.global_unstructured([(m, "weight") for m in other], kind, amount=amount)
        for mine, pytorch in zip(ours, other, strict=True):
            assert torch.equal(mask_of(mine, "weight"), pytorch.weight_mask != 0)
        if isinstance(amount, int) and amount * 2 > sum(t.numel() for t in tensors):
            break


@pytest.mark.parametrize("name", ["l1", "ln"])
def test_importance_scores_rank_in_the_place_of_values(name):
    t, scores = torch.randn(6, 4), torch.randn(6, 4)
    mine, other = Holder(t), Holder(t)
    if name == "l1":
        masks.l1_unstructured(mine, "weight", 0.5, scores)
        theirs.l1_unstructured(other, "weight", 0.5, importance_scores=scores)
    else:
        masks.ln_structured(mine, "weight", 0.5, 2, 0, scores)
        theirs.ln_structured(other, "weight", 0.5, 2, 0, importance_scores=scores)
    assert torch.equal(mask_of(mine, "weight"), other.weight_mask != 0)


@settings(max_examples=200)
@given(st.sampled_from([(8, 8), (7, 9), (4, 12), (5, 3)]), st.floats(0, 1),
       st.sampled_from([(1, 4), (2, 2), (3, 5), (1, 1)]), st.integers(0, 15),
       st.sampled_from([1, 2]), st.integers(0, 99))  # fmt: skip
def test_blocks_are_those_of_the_weight_norm_sparsifier(shape, level, block, zeros, norm, seed):
    ao = pytest.importorskip("torch.ao.pruning")
    zeros = min(zeros, block[0] * block[1])
    if 0 < zeros < block[0] * block[1] and any(n % b for n, b in zip(shape, block, strict=True)):
        return  # PyTorch's two masks have different shapes there, and it raises
    t = values(shape, torch.float32, seed, False)
    mine, other = Holder(t), nn.Linear(shape[1], shape[0], bias=False)
    other.weight.data = t.clone()
    masks.block_norm(mine, "weight", level, block, zeros, norm)
    sparsifier = ao.WeightNormSparsifier(level, block, zeros, norm)
    sparsifier.prepare(nn.Sequential(other), [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    expected = other.parametrizations.weight[0].mask != 0
    assert torch.equal(mask_of(mine, "weight"), expected.expand(shape))


def test_two_of_four_is_two_of_every_four():
    linear = masks.block_norm(nn.Linear(32, 16), "weight", sparse_block_shape=(1, 4),
                              zeros_per_block=2)  # fmt: skip
    kept = mask_of(linear, "weight").reshape(-1, 4)
    assert (kept.sum(1) == 2).all()
    rows = linear.parametrizations.weight.original.reshape(-1, 4).abs()
    assert (rows.masked_fill(~kept, 9).amin(1) >= rows.masked_fill(kept, 0).amax(1)).all()


def test_blocks_may_be_ragged_and_of_more_dimensions():
    conv = masks.block_norm(nn.Conv2d(3, 4, 5), "weight", 0.5, (2, 2), norm=1)
    assert 0.3 < masks.sparsity(conv)["weight"] < 0.7
    linear = masks.block_norm(nn.Linear(7, 5), "weight", 1.0, (2, 4), 3)
    assert masks.sparsity(linear)["weight"] > 0.3


@settings(max_examples=60)
@given(st.sampled_from([(6, 6), (4, 9), (9, 3)]), st.integers(-1, 9))
def test_diagonals_are_those_of_the_sparsifier(shape, nearliness):
    ao = pytest.importorskip("torch.ao.pruning")
    mine, other = Holder(torch.randn(shape)), nn.Linear(shape[1], shape[0], bias=False)
    sparsifier = ao.NearlyDiagonalSparsifier(nearliness)
    sparsifier.prepare(nn.Sequential(other), [{"tensor_fqn": "0.weight"}])
    try:
        sparsifier.step()
    except ValueError:
        with pytest.raises(SettingError, match="nearliness"):
            masks.nearly_diagonal(mine, "weight", nearliness)
        return
    masks.nearly_diagonal(mine, "weight", nearliness)
    assert torch.equal(mask_of(mine, "weight"), other.parametrizations.weight[0].mask != 0)


@pytest.mark.parametrize("distance", [1, 2, lambda rows: torch.cdist(rows, rows, p=3)])
def test_filters_near_the_geometric_median_go(distance):
    conv = nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        conv.weight[[1, 4, 6]] = conv.weight.mean(0) + 0.001 * torch.randn(3, 3, 3, 3)
    masks.fpgm(conv, "weight", 3, distance=distance)
    assert (~mask_of(conv, "weight")).flatten(1).all(1).nonzero().flatten().tolist() == [1, 4, 6]


# -- what masks are held to -----------------------------------------------------------------------


def test_the_parameter_is_the_same_object_before_and_after():
    linear = nn.Linear(6, 4)
    weight = linear.weight
    masks.l1_unstructured(linear, "weight", 0.5)
    assert linear.parametrizations.weight.original is weight
    masks.l1_unstructured(linear, "weight", 0.5)
    masks.remove(linear, "weight")
    assert linear.weight is weight and not masks.is_pruned(linear)
    assert int((weight == 0).sum()) == 18


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_masked_entries_get_no_gradient_and_do_not_move(kind):
    linear = nn.Linear(6, 4)
    optimizer = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
                 "adam": lambda p: torch.optim.Adam(p, 0.1)}[kind](linear.parameters())  # fmt: skip
    masks.ln_structured(linear, "weight", 0.5, 2, 0)
    gone = ~mask_of(linear, "weight")
    before = linear.parametrizations.weight.original.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        linear(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    original = linear.parametrizations.weight.original
    assert (original.grad[gone] == 0).all() and (linear.weight[gone] == 0).all()
    assert torch.equal(original[gone], before[gone]) and not torch.equal(original, before)


def test_an_identity_mask_changes_neither_forward_nor_backward():
    plain = nn.Linear(6, 4)
    masked = masks.identity(masks.identity(copy.deepcopy(plain), "weight"), "bias")
    x = torch.randn(5, 6)
    for m in (plain, masked):
        m(x).square().sum().backward()
    assert torch.equal(plain(x), masked(x))
    assert torch.equal(plain.weight.grad, masked.parametrizations.weight.original.grad)


def test_masks_are_saved_loaded_copied_and_pickled_before_and_after_removal():
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    masks.l1_unstructured(net[0], "weight", 0.5)
    x = torch.randn(5, 6)
    file = io.BytesIO()
    torch.save(copy.deepcopy(net), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), net(x))
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    masks.identity(other[0], "weight")
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(x), net(x)) and masks.sparsity(other) == {"0.weight": 0.5}
    masks.remove(other[0], "weight")
    assert set(other.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(other(x), net(x))


def test_recurrent_layers_use_the_masked_weights_and_are_whole_again_afterwards():
    lstm, x = nn.LSTM(6, 8), torch.randn(5, 2, 6)
    masks.l1_unstructured(lstm, "weight_hh_l0", 0.5)
    expected = nn.LSTM(6, 8)
    expected.load_state_dict({k.replace("parametrizations.", "").replace(".original", ""): v
                              for k, v in lstm.state_dict().items() if ".keep" not in k
                              and ".0." not in k})  # fmt: skip
    with torch.no_grad():
        expected.weight_hh_l0.copy_(lstm.weight_hh_l0)
    assert torch.equal(lstm(x)[0], expected(x)[0])
    masks.remove(lstm, "weight_hh_l0")
    assert torch.equal(lstm(x)[0], expected(x)[0])
    with torch.no_grad():
        lstm.weight_hh_l0.zero_()
    assert not torch.equal(lstm(x)[0], expected(x)[0]), "it reads the parameter itself"


def test_masks_go_on_top_of_another_parametrization():
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    masks.l1_unstructured(linear, "weight", 0.5)
    assert int((linear.weight == 0).sum()) == 12
    masks.remove(linear, "weight")
    assert hasattr(linear, "parametrizations") and int((linear.weight.abs() < 1e-7).sum()) == 12


@pytest.mark.parametrize("call, words", [
    (lambda m: masks.l1_unstructured(m, "weight", 1.5), "neither a fraction"),
    (lambda m: masks.l1_unstructured(m, "weight", -1), "neither a fraction"),
    (lambda m: masks.l1_unstructured(m, "weight", "half"), "neither a fraction"),
    (lambda m: masks.l1_unstructured(m, "weight", True), "neither a fraction"),
    (lambda m: masks.l1_unstructured(m, "weight", 99), "more than the 24"),
    (lambda m: masks.l1_unstructured(m, "weights", 1), "no parameter or buffer 'weights'"),
    (lambda m: masks.l1_unstructured(3, "weight", 1), "not a torch.nn.Module"),
    (lambda m: masks.ln_structured(m, "bias", 1, 2, 0), "two dimensions at least"),
    (lambda m: masks.ln_structured(m, "weight", 1, 2, 2), "dim=2 is no dimension"),
    (lambda m: masks.custom_from_mask(m, "weight", torch.ones(2)), "not a tensor of shape"),
    (lambda m: masks.l1_unstructured(m, "weight", 1, torch.ones(2)), "importance_scores"),
    (lambda m: masks.block_norm(m, "weight", 2.0), "sparsity_level"),
    (lambda m: masks.block_norm(m, "weight", 1.0, (1, 4), 5), "zeros_per_block"),
    (lambda m: masks.block_norm(m, "weight", 1.0, (0, 4)), "sparse_block_shape"),
    (lambda m: masks.block_norm(m, "weight", norm=3), "norm=3"),
    (lambda m: masks.fpgm(m, "weight", 1, distance=3), "distance=3"),
    (lambda m: masks.nearly_diagonal(m, "weight", 2), "nearliness=2"),
    (lambda m: masks.nearly_diagonal(m, "weight", "x"), "nearliness='x'"),
    (lambda m: masks.l1_unstructured(m, "weight", 1, m.weight * math.nan), "they hold NaN"),
    (lambda m: masks.custom_from_mask(m, "weight", m.weight * math.nan), "holds NaN"),
    (lambda m: masks.apply(m, "weight", 3), "method=3"),
    (lambda m: masks.block_norm(m, "weight", sparse_block_shape=4), "sparse_block_shape=4"),
    (lambda m: masks.block_norm(m, "weight", sparse_block_shape=(1, "x")), "sparse_block_shape="),
    (lambda m: masks.block_norm(m, "weight", zeros_per_block="x"), "zeros_per_block='x'"),
    (lambda m: masks.block_norm(m, "weight", "x"), "sparsity_level='x'"),
    (lambda m: masks.random_unstructured(m, "weight", 1, generator=3), "generator=3"),
    (lambda m: masks.random_structured(m, "weight", 1, 0, generator=3), "generator=3"),
    (lambda m: masks.mask_of(m, "x"), "no tensor 'x'"),
    *((lambda m, f=f: f(None), "NoneType, not a torch.nn.Module") for f in (
        masks.is_pruned, masks.sparsity, masks.from_torch_prune, masks.to_torch_prune,
        masks.to_semi_structured)),
    (lambda m: masks.identity(nn.Linear(2, 2, bias=False), "bias"), "'bias'; it has weight$"),
    (lambda m: masks.global_unstructured([m], 0.5), "Linear is no pair"),
    (lambda m: masks.global_unstructured(m, 0.5), "are no pairs"),
    (lambda m: masks.global_unstructured([(m, "weight")], 0.5, importance_scores=m.weight), "maps"),
    (lambda m: masks.global_unstructured(
        [(m, "weight")], 0.5, importance_scores={(m, "bias"): m.bias}), "'bias'. is none of"),
    (lambda m: masks.global_unstructured(
        [(m, "weight")], 0.5, "random", importance_scores={(m, "weight"): m.weight}), "nothing"),
    (lambda m: masks.global_unstructured([(m, "weight")], 1, generator=torch.Generator()), "only"),
    (lambda m: masks.remove(m, "weight"), "no mask that could be removed"),
    (lambda m: masks.global_unstructured([], 0.5), "no parameters"),
    (lambda m: masks.global_unstructured([(m, "weight")], 0.5, lambda s, k, a: s), "bool tensor"),
    (lambda m: masks.ln_structured(m, "weight", 0.5, "nuc", 0), "norm of matrices"),
    (lambda m: masks.global_unstructured([(m, "weight")], 0.5, "l7"), "method='l7'"),
])  # fmt: skip
def test_what_is_wrong_is_said_and_leaves_the_module_as_it_was(call, words):
    linear = nn.Linear(6, 4)
    before = {k: v.clone() for k, v in linear.state_dict().items()}
    with pytest.raises(SettingError, match=words):
        call(linear)
    assert before.keys() == linear.state_dict().keys() and type(linear) is nn.Linear
    assert all(torch.equal(v, linear.state_dict()[k]) for k, v in before.items())


def test_masks_of_pytorch_are_read_and_written():
    x = torch.randn(5, 6)
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4))
    weight = net[0].weight
    theirs.l1_unstructured(net[0], "weight", 0.5)
    theirs.ln_structured(net[0], "weight", 1, 2, 0)
    theirs.random_unstructured(net[1], "bias", 2)
    expected, beneath = net(x), net[0].weight_orig.detach().clone()
    masks.from_torch_prune(net)
    assert not theirs.is_pruned(net) and masks.is_pruned(net)
    assert torch.equal(net(x), expected)
    assert net[0].parametrizations.weight.original is weight and torch.equal(weight, beneath)
    masks.to_torch_prune(net)
    assert theirs.is_pruned(net) and not masks.is_pruned(net)
    assert torch.equal(net(x), expected) and torch.equal(net[0].weight_orig, beneath)


def test_masks_of_sparsifiers_are_read():
    ao = pytest.importorskip("torch.ao.pruning")
    net = nn.Sequential(nn.Linear(8, 4))
    sparsifier = ao.WeightNormSparsifier(0.5, (1, 4))
    sparsifier.prepare(net, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    x = torch.randn(3, 8)
    expected = net(x)
    masks.from_torch_prune(net)
    assert masks.sparsity(net) == {"0.weight": 0.5} and torch.equal(net(x), expected)


def test_semi_structured_weights_need_a_gpu_and_say_so():
    net = nn.Sequential(masks.block_norm(nn.Linear(32, 16), "weight", zeros_per_block=2))
    with pytest.raises(SettingError, match=r"GPU of compute capability 8\.0"):
        masks.to_semi_structured(net)


@pytest.mark.parametrize("first", ["weight", "bias"])
def test_parameters_stand_in_their_old_order_once_masks_are_off(first):
    """An optimizer's state goes by it."""
    layer = nn.GRUCell(4, 3)
    names = [name for name, _ in layer.named_parameters()]
    masked = sorted(names, key=lambda name: not name.startswith(first))
    for name in masked:
        masks.random_unstructured(layer, name, 0.5)
    for name in names[::2] + names[1::2]:
        masks.remove(layer, name)
    assert [name for name, _ in layer.named_parameters()] == names
