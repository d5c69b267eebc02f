"""Calibration: what is folded is the regression, and it is better than a constant."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import fxprune
from fxprune.calibration.regression import Sums
from fxprune.errors import SettingError
from fxprune.modules.batches import as_input
from fxprune.proving.proof import prove
from fxprune.relating.readers import Run

from .test_trace import Net


def randomised(model, seed=0):
    """Non-zero biases, norms and statistics that say something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in model.state_dict().items():
            if t.is_floating_point() and t.dim() < 2:
                noise = torch.rand(t.shape, generator=generator, dtype=torch.float64)
                t.copy_(0.5 + noise if name.endswith(("var", "weight")) else noise - 0.3)
    return model.double().eval()


def correlated(count, *shape, seed=0, rank=3):
    """Inputs of few sources: what one channel says, others say too."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(rank, *shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(count, rank, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    return torch.tensordot(weights, basis, 1) + 0.05 * noise


def conv_net():
    return randomised(nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 12, 3, groups=2), nn.SiLU(),
        nn.ConvTranspose2d(12, 10, 2), nn.Sigmoid(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(40, 5),
    ))  # fmt: skip


def residual_net():
    def forward(s, x):
        x = s.first(x)
        for block in s.blocks:
            x = x + block(x)
        return s.last(F.silu(x).mean((2, 3)))

    def block():
        return nn.Sequential(
            nn.Conv2d(8, 10, 1), nn.BatchNorm2d(10), nn.Tanh(), nn.Conv2d(10, 8, 1)
        )

    return randomised(Net(forward, first=nn.Conv2d(3, 8, 3), last=nn.Linear(8, 5),
                          blocks=nn.ModuleList([block(), block()])))  # fmt: skip


def attention_net():
    def forward(s, x):
        x = s.embed(x)
        y = s.norm(x)
        x = x + s.attention(y, y, y, need_weights=False)[0]
        return s.last(F.gelu(s.up(x)))

    return randomised(Net(
        forward, embed=nn.Linear(6, 16), norm=nn.LayerNorm(16), up=nn.Linear(16, 24),
        attention=nn.MultiheadAttention(16, 4, batch_first=True), last=nn.Linear(24, 3),
    ))  # fmt: skip


def lstm_net(kind=nn.LSTM, **settings):
    def forward(s, x):
        return s.last(s.lstm(x)[0])

    lstm = kind(6, 12, 2, batch_first=True, **settings)
    ways = 2 if settings.get("bidirectional") else 1
    return randomised(Net(forward, lstm=lstm, last=nn.Linear(12 * ways, 3)))


IMAGES, STEPS = correlated(40, 3, 9, 9), correlated(40, 7, 6)
NETS = {
    "convolutions": (conv_net, IMAGES),
    "residual": (residual_net, IMAGES),
    "attention": (attention_net, STEPS),
    "lstm": (lstm_net, STEPS),
    "gru, both ways": (lambda: lstm_net(nn.GRU, bidirectional=True), STEPS),
}


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
@pytest.mark.parametrize("name", NETS)
def test_calibrated_is_proved_and_nearer_to_the_model_than_constants(name, mode):
    build, data = NETS[name]
    model, cal, unseen = build(), data[:32], data[32:]
    wanted = model(unseen)

    def off(**settings):
        plan = fxprune.plan(model, unseen[:2], sparsity=0.5, **settings)
        small = plan.apply(model)
        assert prove(plan, model, small, unseen[:2]) <= 1e-9
        return float((small(unseen) - wanted).square().mean())

    plain = off()
    assert off(calibration=[cal[:16], cal[16:]], calibration_mode=mode) < 0.5 * plain


def hooked(plan, model):
    """The masked model, with each regression applied to what its layer reads: W (A x + b). This
    shares no code with folding W · A; readers are modules that read along dimension 1 or -1."""
    masked = plan.mask(model)
    original = dict(model.named_modules())
    for name, mix in plan._mixes.items():
        path = name.removesuffix(".weight")
        layer = masked.get_submodule(path)
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        with torch.no_grad():
            layer.weight.copy_(original[path].weight)
            layer.bias.copy_(original[path].bias)
            for axis in plan._relations.sources:
                if axis.name == name and axis.role == "out":  # dead outputs stay dead
                    dead = axis.laid(plan.flags("removed", axis))
                    layer.weight.copy_(
                        (layer.weight.reshape(axis.view) * ~dead).reshape(layer.weight.shape)
                    )

        def hook(module, args, mix=mix):
            x = args[0].movedim(1, -1) if args[0].dim() == 4 else args[0]
            parts = zip(
                x.unflatten(-1, mix.offset.shape).unbind(-2), mix.index, mix.matrix, strict=True
            )
            made = [part[..., index] @ matrix.T for part, index, matrix in parts]
            y = torch.stack(made, -2).flatten(-2) + mix.offset.reshape(-1)
            return (y.movedim(-1, 1) if args[0].dim() == 4 else y,)

        layer.register_forward_pre_hook(hook)
    return masked


@pytest.mark.parametrize("name", ["convolutions", "residual"])
def test_what_is_folded_is_what_the_regression_says(name):
    build, data = NETS[name]
    model = build()
    plan = fxprune.plan(model, data[:2], sparsity=0.5, calibration=[data[:32]])
    small = plan.apply(model)
    assert torch.allclose(hooked(plan, model)(data[32:]), small(data[32:]), rtol=0, atol=1e-9)


def test_the_regression_is_the_one_that_numpy_solves():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    x[:, 3:] = x[:, :3] @ torch.randn(3, 3, generator=generator, dtype=torch.float64) + 2
    drifted = x * 1.1 + 0.05 * torch.randn(500, 6, generator=generator, dtype=torch.float64)
    kept = torch.tensor([[True, False, True, True, False, False]])
    sums = Sums(kept, torch.eye(6, dtype=torch.float64)[None])
    for some in range(0, 500, 100):
        sums.add(x[some : some + 100], drifted[some : some + 100], 100)
    fit = sums.fit()
    features = drifted[:, kept[0]] - drifted[:, kept[0]].mean(0)
    missing = torch.where(kept, x - drifted, x)
    pulled = torch.cat([features, torch.diag(fit.ridge**0.5 * features.norm(dim=0))])
    wanted = torch.cat([missing - missing.mean(0), torch.zeros(3, 6, dtype=x.dtype)])
    extra = torch.linalg.lstsq(pulled, wanted).solution.T
    select = torch.eye(6, dtype=x.dtype)[:, kept[0]]
    assert torch.allclose(fit.matrix[0], select + extra, atol=1e-6)
    made = drifted[:, kept[0]] @ fit.matrix[0].T + fit.offset[0]
    assert torch.allclose(made.mean(0), x.mean(0), atol=1e-9)
    left = (x - made).square().sum() / (x - x.mean(0)).square().sum()
    assert fit.error == pytest.approx(float(left), rel=0.2)  # of samples left out
    assert fit.samples == 500


def test_with_fewer_samples_than_channels_the_ridge_leaves_what_is_not_known():
    kept = torch.arange(40)[None] < 20
    sums = Sums(kept, torch.eye(40, dtype=torch.float64)[None])
    x = torch.randn(12, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums.add(x, x, 12)
    fit = sums.fit()
    assert fit.ridge > 1e-3 and bool(fit.matrix.isfinite().all())


@pytest.mark.parametrize("scope", ["local", "global"])
@pytest.mark.parametrize("name", NETS)
def test_units_that_the_layers_behind_can_make_out_go_first(name, scope):
    build, data = NETS[name]
    model, cal, unseen = build(), data[:32], data[32:]

    def off(**settings):
        plan = fxprune.plan(model, unseen[:2], sparsity=0.5, calibration=[cal], **settings)
        small = plan.apply(model)
        assert prove(plan, model, small, unseen[:2]) <= 1e-9
        return float((small(unseen) - model(unseen)).square().mean())

    error = off(importance="reconstruction", scope=scope)
    assert scope == "global" or error < off(importance="random")  # what is shared out may not be


def test_channels_that_say_the_same_are_never_both_kept():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        model[0].weight[4:] = model[0].weight[:4]
        model[0].bias[4:] = model[0].bias[:4]
    x = torch.randn(64, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    small = fxprune.prune(model, x[:2], calibration=[x], importance="reconstruction")
    assert small[0].out_features == 4
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-6)


def test_a_global_budget_leaves_the_work_that_the_local_one_leaves():
    model = conv_net()
    settings = {"calibration": [IMAGES], "importance": "reconstruction"}

    def work(model):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(IMAGES[:1])
        return counter.get_total_flops()

    local, shared = (
        work(fxprune.prune(model, IMAGES[:2], scope=scope, **settings))
        for scope in ("local", "global")
    )
    assert shared == pytest.approx(local, rel=0.25)


def test_a_calibrated_masked_model_trains_and_is_what_apply_makes_of_it():
    model = conv_net()
    plan = fxprune.plan(model, IMAGES[:2], calibration=[IMAGES])
    masked = plan.mask(model)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.01)
    masked(IMAGES[:4]).square().mean().backward()
    optimizer.step()
    small = plan.apply(masked)
    assert torch.allclose(small(IMAGES), masked(IMAGES), rtol=0, atol=1e-9)
    assert plan.predicted_error and "calibrated: predicted error" in str(plan)


def test_calibration_leaves_the_model_as_it_was_and_gives_the_same_twice():
    model = residual_net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()
    first, second = (
        fxprune.prune(model, IMAGES[:2], calibration=[IMAGES[:16], IMAGES[16:]]) for _ in range(2)
    )
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(first.eval()(IMAGES), second.eval()(IMAGES))


def test_labels_are_left_out_and_a_limit_and_one_pass_iterables_are_taken():
    model = conv_net()
    plain = fxprune.prune(model, IMAGES[:2], calibration=[IMAGES[:16]])
    labelled = [(IMAGES[:16], torch.zeros(16)), (IMAGES[16:], torch.zeros(24))]
    for given in (labelled, iter(labelled)):
        small = fxprune.prune(model, IMAGES[:2], calibration=given, calibration_batches=1)
        assert torch.equal(small(IMAGES), plain(IMAGES))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES[:16]), 16)
    small = fxprune.prune(model, IMAGES[:2], calibration=loader, importance="reconstruction")
    assert small[0].out_channels == 4


def test_mappings_and_several_arguments_are_batches_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x, y):
            return self.c(torch.tanh(self.a(x) + self.b(y)))

    model, (x, y) = Two().double(), (STEPS[:, 0], STEPS[:, 1])
    by_name = fxprune.prune(
        model, {"x": x[:2], "y": y[:2]}, calibration=[{"x": x, "y": y, "labels": x}]
    )
    for batch in ((x, y), [x, y], ((x, y), torch.zeros(40))):
        by_place = fxprune.prune(model, (x[:2], y[:2]), calibration=[batch])
        assert torch.equal(by_name(x, y), by_place(x, y))


@pytest.mark.parametrize("settings, words", [
    ({"calibration": IMAGES}, "no iterable of batches"),
    ({"calibration": 3}, "no iterable of batches"),
    ({"calibration": []}, "has no batches"),
    ({"calibration": [IMAGES], "calibration_batches": 0}, "no positive integer"),
    ({"calibration": [IMAGES], "calibration_mode": "fast"}, "use one of sequential, parallel"),
    ({"importance": "reconstruction"}, "pass calibration="),
    ({"calibration_mode": "parallel"}, "pass both"),
])  # fmt: skip
def test_what_cannot_be_calibrated_with_is_said(settings, words):
    with pytest.raises(SettingError, match=words):
        fxprune.plan(conv_net(), IMAGES[:2], **settings)


def test_inputs_that_give_no_numbers_leave_constants_and_say_so():
    model = conv_net()
    bad = IMAGES[:8].clone()
    bad[0, 0, 0, 0] = torch.nan
    plan = fxprune.plan(model, IMAGES[:2], calibration=[bad])
    plain = fxprune.plan(model, IMAGES[:2])
    assert any("inf or NaN" in why for _, why in plan.notes) and not plan.predicted_error
    assert torch.equal(plan.apply(model)(IMAGES), plain.apply(model)(IMAGES))


def test_dead_channels_and_half_precision_are_fine():
    model = conv_net()
    with torch.no_grad():
        model[0].weight[2:4] = 0
    small = fxprune.prune(model, IMAGES[:2], calibration=[IMAGES])
    assert bool(small(IMAGES).isfinite().all())
    half = model.to(torch.bfloat16)
    small = fxprune.prune(half, IMAGES[:2].bfloat16(), calibration=[IMAGES.bfloat16()])
    assert bool(small(IMAGES.bfloat16()).isfinite().all())


def test_a_weight_that_is_used_twice_is_not_calibrated_and_that_is_said():
    def forward(s, x):
        y = torch.tanh(s.a(x))
        return s.c(torch.tanh(s.b(y))) + s.c(torch.sigmoid(s.b(y + 1)))

    model = randomised(Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3)))
    x = STEPS[:, 0]
    plan = fxprune.plan(model, x[:2], calibration=[x])
    assert any("used in several places" in why for _, why in plan.notes)
    assert prove(plan, model, plan.apply(model), x) <= 1e-9


def test_one_input_and_channels_that_never_move_are_enough_to_choose_by():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    model = model.double()
    with torch.no_grad():
        model[0].bias[:8] = -100.0
    for count in (1, 2, 5):
        small = fxprune.prune(
            model, STEPS[:2, 0], calibration=[STEPS[:count, 0]], importance="reconstruction",
            scope="global",
        )  # fmt: skip
        assert bool(small(STEPS[:, 0]).isfinite().all())


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3)
    ).double()


def test_predictions_are_folded_once_whatever_a_plan_is_used_on():
    model, x = mlp(), STEPS[:, 0]
    plan = fxprune.plan(model, x[:2], calibration=[x])
    masked = plan.mask(model)
    assert torch.allclose(plan.mask(masked)(x), masked(x), rtol=0, atol=1e-9)
    assert prove(plan, masked, plan.apply(masked), x) <= 1e-9
    other = fxprune.plan(masked, x[:2], sparsity=0.25, calibration=[x])  # whose own are folded too
    assert prove(other, masked, other.apply(masked), x) <= 1e-9


def test_of_a_model_whose_masks_lie_elsewhere_than_its_predictions_too():
    def forward(s, x):
        y, z = torch.tanh(s.s(torch.tanh(s.a(x)))), torch.tanh(s.s(torch.tanh(s.a(2 * x))))
        return s.last(y + z)

    model = Net(forward, a=nn.Linear(6, 8), s=nn.Linear(8, 8), last=nn.Linear(8, 3)).double()
    x = STEPS[:, 0]
    plan = fxprune.plan(model, x[:2], calibration=[x], ignore=["s"])
    masked = plan.mask(model)
    assert torch.allclose(plan.apply(masked)(x), masked(x), rtol=0, atol=1e-9)


def test_another_model_gets_the_offset_through_its_own_weights():
    model, x = mlp(), STEPS[:, 0]
    plan = fxprune.plan(model, x[:2], calibration=[x])
    negative = copy.deepcopy(model)
    with torch.no_grad():
        negative[4].weight.neg_()
        negative[4].bias.neg_()
    assert torch.allclose(plan.apply(negative)(x), -plan.apply(model)(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [6, 16])
def test_constants_before_padded_convolutions_are_right_at_the_border(size):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.Sigmoid(), nn.Conv2d(32, 32, 3, padding=1),
              nn.Sigmoid(), nn.Conv2d(32, 6, 3, padding=1)]  # fmt: skip
    model = nn.Sequential(*layers).eval()
    seen, unseen = torch.randn(32, 3, size, size), torch.randn(32, 3, size, size)
    wanted = model(unseen)

    def off(**settings):
        small = fxprune.prune(model, seen[:1], **settings)
        return float((small(unseen) - wanted).square().mean() / wanted.var())

    assert off(calibration=[seen]) < 0.1 * off()


def test_batches_of_one_input_are_split_as_one_large_one_is():
    kept = torch.tensor([[True, True, False]])
    x = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.eye(3, dtype=torch.float64)[None]
    whole, single = Sums(kept, weight), Sums(kept, weight)
    whole.add(x, x, 40)
    for row in x.split(1):
        single.add(row, row, 1)
    assert [p.count for p in whole.parts] == [p.count for p in single.parts] == [30, 10]
    assert torch.allclose(whole.fit().matrix, single.fit().matrix)


def test_a_loud_channel_does_not_drown_the_others():
    x = torch.randn(512, 20, generator=torch.Generator().manual_seed(0))

    def off(scale):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)
        )
        with torch.no_grad():  # the same function
            model[2].weight[0] *= scale
            model[2].bias[0] *= scale
            model[4].weight[:, 0] /= scale
        small = fxprune.prune(model, x[:2], calibration=[x], importance=by_position)
        return float((small(x) - model(x)).square().mean() / model(x).var())

    def by_position(group):
        return -torch.arange(float(group[0].count))

    assert off(1e4) < 1.2 * off(1.0)


def test_random_numbers_of_the_forward_are_the_same_in_both_runs():
    def forward(s, x):
        y = torch.tanh(s.a(x))
        return s.c(torch.relu(s.b(y + torch.randn_like(y))))

    model = Net(forward, a=nn.Linear(6, 16), b=nn.Linear(16, 32), c=nn.Linear(32, 3)).double()
    x = STEPS[:, 0].repeat(8, 1)

    def off(**settings):
        small = fxprune.prune(model, x[:2], ignore=["a"], verify=False, **settings)
        torch.manual_seed(1)
        wanted = model(x)
        torch.manual_seed(1)
        return float((small(x) - wanted).square().mean())

    assert off(calibration=[x]) < 0.5 * off()


def test_weights_that_are_buffers_and_those_behind_a_weight_norm_are_calibrated():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = nn.Linear(6, 8), nn.Linear(4, 3)
            self.register_buffer("w", torch.randn(4, 8))

        def forward(self, x):
            return self.c(torch.tanh(F.linear(torch.tanh(self.a(x)), self.w)))

    x = STEPS[:, 0]
    normed = mlp()
    nn.utils.parametrizations.weight_norm(normed[0])
    for model in (Fixed().double(), normed):
        plan = fxprune.plan(model, x[:2], calibration=[x])
        assert plan.predicted_error and not any("NaN" in why for _, why in plan.notes)
        assert prove(plan, model, plan.apply(model), x) <= 1e-9


def test_where_constants_are_dropped_predictions_change_weights_alone():
    net = randomised(nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12, bias=False), nn.ReLU(), nn.Linear(12, 3)
    ))  # fmt: skip
    inputs = correlated(256, 6)
    errors = {}
    for bias, calibration in ("drop", None), ("drop", [inputs]), ("propagate", [inputs]):
        small = fxprune.prune(net, inputs[:2], bias=bias, calibration=calibration)
        errors[bias, calibration is not None] = (small(inputs) - net(inputs)).square().mean()
        assert (small[2].bias is None) == (bias == "drop")
        assert torch.equal(small[4].bias, net[4].bias) == (bias == "drop")
    assert errors["propagate", True] < errors["drop", True] < errors["drop", False]


def test_a_model_with_a_configuration_gets_no_bias_that_it_does_not_know():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12, bias=False), nn.ReLU(), nn.Linear(12, 3)
    ).double()
    x = STEPS[:, 0]
    assert fxprune.prune(model, x[:2], calibration=[x])[2].bias is not None
    model.config = type("Config", (), {})()
    assert fxprune.prune(model, x[:2], calibration=[x])[2].bias is None


@pytest.mark.parametrize("batches, words", [
    ([{"input": STEPS[:, 0]}], "a batch is a mapping"),
    ([STEPS[:, 0, :5]], "a batch does not run"),
    ([None], "a batch does not run"),
])  # fmt: skip
def test_batches_that_are_none_of_the_model_are_said_to_be(batches, words):
    with pytest.raises(fxprune.InputError, match=words):
        fxprune.plan(mlp(), STEPS[:2, 0], calibration=batches)


def test_an_argument_that_is_a_tuple_is_no_batch_with_a_label():
    example = ((STEPS[:2, 0], STEPS[:2, 1]), STEPS[:2, 2])
    assert as_input(example, example, "batches") is not None
    assert torch.equal(as_input(example, example, "batches")[1], STEPS[:2, 2])


def test_a_data_loader_is_asked_without_a_trace_on_the_random_numbers():
    model, x = mlp(), STEPS[:, 0]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 20)
    before = torch.get_rng_state()
    fxprune.plan(model, x[:2], calibration=loader, importance="reconstruction")
    assert torch.equal(torch.get_rng_state(), before)


def test_small_groups_take_part_in_a_global_budget():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = STEPS[:, 0]
    small = fxprune.prune(model.double(), x[:2], calibration=[x], importance="reconstruction",
                          scope="global")  # fmt: skip
    assert small[0].out_features + small[2].out_features < 8


def test_where_nothing_has_moved_half_of_the_sums_are_enough():
    kept = torch.tensor([[True, False, True, True], [False, True, True, True]])
    x = torch.randn(60, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, half = Sums(kept, weight), Sums(kept, weight, same=True)
    assert half.parts[0].cross.shape == (2, 1, 3) and whole.parts[0].cross.shape == (2, 4, 3)
    for sums in (whole, half):
        sums.add(x, x, 60)
    a, b = whole.fit(), half.fit()
    assert torch.allclose(a.matrix, b.matrix) and torch.allclose(a.offset, b.offset)
    assert a.error == pytest.approx(b.error)


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, options, scale=None):
        y = torch.tanh(self.first(x)) if options["tanh"] else self.first(x)
        return self.last(y * 2 if scale is None else y * scale)


@pytest.mark.parametrize("other, words", [
    ({"options": {"tanh": False}, "scale": 2.0}, r"False in the place of True at \['options'\]"),
    ({"options": {"tanh": True}, "scale": 3.0}, r"3.0 in the place of 2.0 at \['scale'\]"),
    ({"options": {"tanh": True}, "scale": torch.ones(())}, "a tensor in the place of 2.0"),
])  # fmt: skip
def test_a_batch_whose_flags_are_not_those_of_the_recorded_run_is_told(other, words):
    x = STEPS[:, 0]
    same = {"x": x, "options": {"tanh": True}, "scale": 2.0}
    example = {**same, "x": x[:2]}
    assert fxprune.plan(Flagged().double(), example, calibration=[same])._mixes
    with pytest.raises(fxprune.InputError, match=words):
        fxprune.plan(Flagged().double(), example, calibration=[same, {**same, **other}])


def test_values_are_let_go_when_their_last_user_has_run(monkeypatch):
    alive, step = [], Run.step

    def counted(run, node, result=None):
        step(run, node, result)
        alive.append(len(run.env))

    monkeypatch.setattr(Run, "step", counted)
    layers = [layer for _ in range(8) for layer in (nn.Linear(6, 6), nn.Tanh())]

    def forward(s, x):
        x.sum()  # nobody's
        return s.body(x)

    model = Net(forward, body=nn.Sequential(*layers, nn.Linear(6, 2))).double()
    for mode in ("sequential", "parallel"):
        fxprune.plan(model, STEPS[:2, 0], calibration=[STEPS[:, 0]], calibration_mode=mode)
    assert len(alive) > 50 and max(alive) <= 2


def test_units_that_no_layer_was_seen_to_read_are_chosen_by_their_weights_and_that_is_said():
    def forward(s, x):
        y = torch.tanh(s.a(x))
        return F.linear(torch.tanh(s.b(y)), s.last * 2)

    model = Net(
        forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), last=nn.Parameter(torch.randn(3, 8))
    ).double()
    plan = fxprune.plan(model, STEPS[:2, 0], calibration=[STEPS[:, 0]], importance="reconstruction")
    assert ("b", "no layer that reads its units was seen: they are chosen by l2") in plan.notes
    assert not [note for note in plan.notes if note[0] == "a"]


class Routed(nn.Module):
    """Each sample goes to the expert that its gate says, and to no other."""

    def __init__(self):
        super().__init__()
        self.a, self.gate = nn.Linear(6, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 4)) for _ in range(3)
        )

    def forward(self, x):
        x = F.silu(self.a(x))
        chosen = self.gate(x).argmax(-1)
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            (at,) = torch.where(chosen == i)
            out.index_add_(0, at, expert(x[at]))
        return out


@pytest.mark.parametrize("mode", ["sequential", "parallel"])
def test_experts_that_other_samples_go_to_once_channels_are_gone_are_calibrated(mode):
    torch.manual_seed(1)
    model, x = randomised(Routed()), STEPS[:, 0]
    settings = {"calibration": [x[:20], x[20:]], "calibration_mode": mode}
    small = fxprune.prune(model, x, importance="reconstruction", sparsity=0.7, **settings)
    assert small.experts[0][0].out_features == 4
    with torch.no_grad():
        chosen = [m.gate(F.silu(m.a(x))).argmax(-1) for m in (model, small)]
    assert not torch.equal(*chosen)  # or this would show nothing


def test_an_expert_that_no_sample_goes_to_is_chosen_by_its_weights():
    model, x = randomised(Routed()), STEPS[:, 0]
    with torch.no_grad():
        model.gate.bias[1] = -1e9
    plan = fxprune.plan(model, x, calibration=[x], importance="reconstruction")
    why = "no layer that reads its units was seen: they are chosen by l2"
    assert [name for name, note in plan.notes if note == why] == ["experts.1.0"]


def test_a_calibrated_weight_lies_in_memory_as_it_did():
    def forward(s, x):
        return s.last(s.b(F.silu(s.a(x))).view(len(x), -1))

    layers = {"a": nn.Conv2d(3, 12, 1), "b": nn.Conv2d(12, 8, 1), "last": nn.Linear(8 * 81, 3)}
    model = randomised(Net(forward, **layers))
    plan = fxprune.plan(model, IMAGES[:4], calibration=[IMAGES])
    assert plan.mask(model).b.weight.stride() == (12, 1, 1, 1)
    assert prove(plan, model, plan.apply(model), IMAGES[:4]) < 1e-9
