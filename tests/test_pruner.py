"""A model that shrinks in place while it trains, with all that refers to it."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxprune
from fxprune import ModelError, PlanError, PruningWarning, SettingError
from fxprune.importance import Taylor, Wanda
from fxprune.rewriting import optimizer_state
from fxprune.rewriting import rewrite as rewriting
from fxprune.schedules import linear
from fxprune.training import pruner

from .oracle import awake, difference, run
from .snapshot import Snapshot
from .test_optimizer_state import IMAGE, MODELS, ROWS, no_biases, taken
from .test_safety import FAULTS, Fault, X, everything, inject


def conv_net():
    torch.manual_seed(0)
    return awake(nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4),
    ))  # fmt: skip


def train(model, optimizer, x, steps=1):
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss


# -- schedules ------------------------------------------------------------------------------------

SCHEDULES = {
    "linear": ({"schedule": "linear", "steps": 4}, [0.125, 0.25, 0.375, 0.5, 0.5]),
    "cubic": ({"schedule": "cubic", "steps": 2, "sparsity": 0.75}, [0.65625, 0.75, 0.75]),
    "once": ({"schedule": "once", "sparsity": 0.25}, [0.25, 0.25]),
    "default": ({}, [0.5, 0.5]),
    "sequence": ({"schedule": [0.25, 0.5, 0.875]}, [0.25, 0.5, 0.875, 0.875]),
    "function": ({"schedule": linear(0.75, 3)}, [0.25, 0.5, 0.75, 0.75]),
    "falling": ({"schedule": lambda step: [0.5, 0.25, 0.75][min(step, 3) - 1]}, [0.5, 0.5, 0.75]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_step_comes_to_the_sparsity_of_the_units_that_there_were_at_first(name):
    settings, wanted = SCHEDULES[name]
    net = conv_net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    pruner = fxprune.Pruner(net, IMAGE, optimizer=optimizer, **settings)
    for i, sparsity in enumerate(wanted):
        train(net, optimizer, IMAGE)
        reached = pruner.step()
        widths = {"0": net[0].out_channels, "3": net[3].out_channels}
        assert widths == {k: int(n * (1 - sparsity) + 0.5) for k, n in {"0": 16, "3": 24}.items()}
        assert reached == pruner.sparsity == pytest.approx(1 - sum(widths.values()) / 40)
        assert pruner.history[i].widths == widths and len(pruner.history) == i + 1
        assert pruner.history[i].parameters == sum(p.numel() for p in net.parameters())
    assert pruner.plan is not None and len(pruner.plan.kept) > 4


@pytest.mark.parametrize("settings", [
    {"sparsity": 0.9}, {"sparsity": 0.5, "round_to": 4}, {"sparsity": 0.7, "round_to": 8},
    {"sparsity": {"0": 0.25}}, {"sparsity": {"0": 0.25, nn.Conv2d: 0.6}}, {"ignore": "3"},
    {"sparsity": 0.99}, {"exact": True, "sparsity": 0.6},
], ids=str)  # fmt: skip
def test_many_steps_come_to_the_widths_of_one(settings):
    once, slowly = conv_net(), conv_net()
    fxprune.Pruner(once, IMAGE, **settings).step()
    several = fxprune.Pruner(slowly, IMAGE, schedule="linear", steps=7, **settings)
    for _ in range(7):
        several.step()
    widths = [(net[0].out_channels, net[3].out_channels) for net in (once, slowly)]
    assert widths[0] == widths[1] and widths[0] != (16, 24)


@pytest.mark.parametrize("schedule", ["linear", "cubic"])
@pytest.mark.parametrize("measure", ["params", "macs"])
def test_a_target_is_neared_step_by_step(schedule, measure):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    counted = {
        "params": lambda: sum(p.numel() for p in net.parameters()),
        "macs": lambda: sum(p.numel() for p in net.parameters() if p.dim() > 1) * len(ROWS),
    }[measure]
    original, x = counted(), ROWS[:, :1].float().expand(-1, 8)
    pruner = fxprune.Pruner(
        net, x, optimizer=optimizer, target=fxprune.Target(**{measure: 0.25}), schedule=schedule,
        steps=3,
    )  # fmt: skip
    widths = []
    for i in range(1, 5):
        train(net, optimizer, x)
        pruner.step()
        share = {"linear": min(i / 3, 1), "cubic": 1 - (1 - min(i / 3, 1)) ** 3}[schedule]
        assert counted() / original == pytest.approx(1 - 0.75 * share, rel=0.011)
        widths.append(pruner.history[-1].widths)
    assert widths[3] == widths[2]


@pytest.mark.parametrize("bound", [{"max_sparsity": 0.6}, {"min_width": 0.4}, {}], ids=str)
def test_bounds_count_the_units_that_there_were_at_first(bound):
    net = conv_net()
    with torch.no_grad():
        net[3].weight.mul_(1e-3)  # all that goes would go here
    pruner = fxprune.Pruner(
        net, IMAGE, sparsity=0.6, scope="global", schedule="linear", steps=4, **bound
    )
    for _ in range(4):
        pruner.step()
    least = {"3": 24 * 0.4} if bound else {"3": 24 * 0.1}
    assert least["3"] <= pruner.history[-1].widths["3"] < least["3"] + 1


def test_a_step_for_less_than_a_unit_changes_nothing_and_says_nothing(recwarn):
    net = conv_net()
    pruner = fxprune.Pruner(net, IMAGE, schedule=[0.01, 0.02, 0.5])
    before = Snapshot(net)
    assert pruner.step() == pruner.step() == 0 and before.differences() == []
    assert len(recwarn) == 0 and pruner.step() == 0.5
    assert [step.sparsity for step in pruner.history] == [0, 0, 0.5]
    assert pruner.step() == 0.5 and len(recwarn) == 0
    with pytest.warns(PruningWarning, match="less than one"):
        fxprune.Pruner(net, IMAGE, schedule=[0.01]).step()


def test_heads_and_then_slices_of_the_last_one_count_as_parts_of_what_there_was():
    build, x = MODELS["attention"]
    net = awake(build())
    pruner = fxprune.Pruner(net, x, schedule=[0.5, 0.75, 0.875])
    found = [(pruner.step(), net.qkv.out_features) for _ in range(3)]
    assert found == [(0.5, 24), (0.75, 12), (0.875, 6)]


def test_importance_is_asked_anew_of_the_model_as_it_is_at_each_step():
    net, asked = conv_net(), []

    def importance(group):
        asked.append(group[0].count)
        return group[0].norms(2)

    pruner = fxprune.Pruner(net, IMAGE, schedule="linear", steps=2, importance=importance)
    assert asked == []
    pruner.step()
    pruner.step()
    assert asked == [16, 24, 12, 18]


def test_calibration_is_taken_at_each_step_and_global_scope_goes_on_from_where_it_is():
    net = conv_net()
    taken_from = []

    class Batches:
        def __iter__(self):
            taken_from.append(net[0].out_channels)
            return iter([IMAGE, IMAGE + 1])

    pruner = fxprune.Pruner(
        net, IMAGE, schedule="linear", steps=2, calibration=Batches(), scope="global",
        importance="reconstruction",
    )  # fmt: skip
    assert taken_from == []
    pruner.step()
    first = net[0].out_channels
    pruner.step()
    assert set(taken_from) == {16, first} and 0.3 < pruner.sparsity < 0.7


# -- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_kept_leads_back_to_the_indices_before_the_first_step(kind):
    build, x = MODELS[kind]
    torch.manual_seed(0)
    net = awake(build())

    def tensors():
        return {**dict(net.named_parameters()), **dict(net.named_buffers())}

    before = {name: t.detach().clone() for name, t in tensors().items()}
    pruner = fxprune.Pruner(net, x, schedule="linear", steps=3, sparsity=0.6, bias="drop")
    for _ in range(3):
        pruner.step()
    assert len(pruner.plan.kept) > 2
    for name, tensor in tensors().items():
        assert torch.equal(tensor, taken(before[name], pruner.kept.get(name, {}))), name
    grouped = [dims[1].dim() for dims in pruner.kept.values() if 1 in dims]
    assert (2 in grouped) == (kind == "shuffled")


CHOSEN = {
    "expected": {"bias": "expected"},
    "drop": {"bias": "drop", "scope": "global", "importance": {"0": "l1", "*": "lamp"}},
    "calibrated": {"calibration": [IMAGE], "importance": "reconstruction"},
    "auto": {"round_to": "auto", "sparsity": {nn.Conv2d: 0.75}},
    "target": {"target": fxprune.Target(params=0.5), "steps": 1, "schedule": "once"},
}


@pytest.mark.parametrize("kind", [*MODELS, "everything", "no biases", *CHOSEN])
def test_a_saved_state_makes_a_new_model_and_its_optimizer_as_small(kind):
    known = {"everything": (everything, X), "no biases": (no_biases, ROWS)}
    known |= {name: (lambda b=b: awake(b()), x) for name, (b, x) in MODELS.items()}
    build, x = known.get(kind, (conv_net, IMAGE))
    settings = {"schedule": "linear", "steps": 3, **CHOSEN.get(kind, {"exact": True})}

    def start():
        net = build().train()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        return net, optimizer, fxprune.Pruner(net, x, optimizer=optimizer, **settings)

    torch.manual_seed(0)
    net, optimizer, pruner = start()
    for _ in range(2):
        train(net, optimizer, x)
        pruner.step()
    saved = io.BytesIO()
    torch.save([m.state_dict() for m in (pruner, net, optimizer)], saved)
    saved.seek(0)
    torch.manual_seed(1)  # other weights
    other, its_optimizer, its_pruner = start()
    for m, state in zip((its_pruner, other, its_optimizer), torch.load(saved, weights_only=True),
                        strict=True):  # fmt: skip
        m.load_state_dict(state)
    assert its_pruner.history == pruner.history and its_pruner.sparsity == pruner.sparsity
    for n, o, p in ((net, optimizer, pruner), (other, its_optimizer, its_pruner)):
        torch.manual_seed(2)
        train(n, o, x)
        p.step()
        train(n, o, x)
    assert difference(run(net.eval(), x), run(other.eval(), x)) == 0
    assert its_pruner.history == pruner.history


def test_a_state_of_another_model_is_refused_and_nothing_changes():
    first = fxprune.Pruner(conv_net(), IMAGE)
    first.step()
    state = first.state_dict()
    with pytest.raises(SettingError, match="new Pruner"):
        first.load_state_dict(state)
    wider = awake(nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)))
    other = fxprune.Pruner(wider, torch.ones(2, 3).double())
    before = Snapshot(wider)
    with pytest.raises(PlanError, match="saved for another model"):
        other.load_state_dict(state)
    assert before.differences() == [] and other.history == []
    twin = fxprune.Pruner(conv_net(), IMAGE)
    before = Snapshot(twin.model)
    wrong = {**state, "kept": {**state["kept"], "0.weight": {0: torch.arange(8)}}}
    with pytest.raises(PlanError, match="saved for another model"):
        twin.load_state_dict(wrong)
    older = {"units": 9, "removed": torch.arange(2), "biases": {}}
    for wrong in (torch.optim.SGD(twin.model.parameters()).state_dict(), {}, None,
                  *({**state, "choices": [c]} for c in (older, 3, {"chosen": {}, "biases": {}}, *(
                      {**state["choices"][0], "biases": b} for b in (
                          None, {3: [4]}, {"0.bias": 4}, {"0.bias": ["4"]}, {"0.b": [4]},
                          {"9.bias": [4]}
                      )
                  )))):  # fmt: skip
        with pytest.raises(PlanError, match="state"):
            twin.load_state_dict(wrong)
    assert before.differences() == []


@pytest.mark.parametrize("settings", [
    {"sparsity": 0.75, "steps": 3}, {"sparsity": 0.5, "steps": 4}, {"schedule": [0.1, 0.2]},
])  # fmt: skip
def test_a_state_of_another_schedule_is_told_and_the_next_step_goes_by_the_new_one(settings):
    def start(**settings):
        return fxprune.Pruner(conv_net(), IMAGE, **settings)

    first = start(sparsity=0.5, steps=3)
    first.step()
    again = start(sparsity=0.5, steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(first.state_dict())
    other = start(**settings)
    with pytest.warns(PruningWarning, match="made for sparsities of 0.352, and by this Pruner's"):
        other.load_state_dict(first.state_dict())
    assert other.sparsity == again.sparsity == first.sparsity


# -- what goes on ---------------------------------------------------------------------------------


def test_every_parameter_stays_the_same_object_and_learning_rates_and_scaling_go_on():
    net = conv_net().float().train()
    x = IMAGE.float()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    pruner = fxprune.Pruner(net, x, optimizer=optimizer, schedule="linear", steps=3)
    before = list(map(id, net.parameters()))
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(net(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        pruner.step()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before
    assert list(map(id, net.parameters())) == before
    assert scaler.get_scale() == 16 and optimizer.param_groups[0]["lr"] == pytest.approx(0)


@pytest.mark.parametrize("how", ["pruner", "prune"])
def test_a_loss_that_is_still_alive_does_not_hold_gradients_to_the_old_shape(how):
    net = conv_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loss = train(net, optimizer, IMAGE)
    called = []
    net[3].weight.register_hook(lambda g: called.append(g.shape))
    if how == "pruner":
        fxprune.Pruner(net, IMAGE, optimizer=optimizer).step()
    else:
        fxprune.prune(net, IMAGE, inplace=True)
    loss = train(net, optimizer, IMAGE)
    assert float(loss.detach()) > 0 and called == [(12, 8, 3, 3)]


def test_gradients_that_are_there_are_cut_so_that_they_can_add_up():
    whole = conv_net()
    whole(IMAGE).sum().backward()
    net = conv_net()
    net(IMAGE).sum().backward()
    pruner = fxprune.Pruner(net, IMAGE)
    pruner.step()
    for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.grad, taken(q.grad, pruner.kept.get(name, {})))
    net(IMAGE).sum().backward()


def test_a_compiled_model_is_compiled_anew():
    net = conv_net()
    compiled = torch.compile(net, backend="eager")
    compiled(IMAGE)
    fxprune.Pruner(net, IMAGE).step()
    assert difference([compiled(IMAGE)], [net(IMAGE)]) == 0


@pytest.mark.parametrize("wrapped", [False, True])
def test_averages_shrink_alike_with_constants_of_their_own_and_go_on(wrapped):
    net = conv_net().train()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        train(net, optimizer, IMAGE)
        ema.update_parameters(net)
    alone = copy.deepcopy(ema.module)
    settings = {"schedule": "linear", "steps": 2, "exact": True}
    also = ema if wrapped else [ema.module]
    pruner = fxprune.Pruner(net, IMAGE, optimizer=optimizer, also=also, **settings)
    pruner.step()
    wanted = pruner.plan.apply(alone)
    assert difference(run(ema.module.eval(), IMAGE), run(wanted.eval(), IMAGE)) == 0
    assert difference(run(net.eval(), IMAGE), run(ema.module, IMAGE)) > 1e-3
    train(net, optimizer, IMAGE)
    ema.update_parameters(net)
    pruner.step()
    now, average = net[3].weight.detach(), ema.module[3].weight.detach().clone()
    train(net, optimizer, IMAGE)
    ema.update_parameters(net)
    assert torch.allclose(ema.module[3].weight, 0.9 * average + 0.1 * now)


def test_averages_have_the_biases_that_folding_makes_though_they_have_nothing_to_fold():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 8), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2)
    ).double()  # fmt: skip
    other = copy.deepcopy(net)
    nn.init.zeros_(other[0].bias)
    pruner = fxprune.Pruner(net, ROWS, also=[other])
    pruner.step()
    assert net[1].bias.abs().max() > 0 and not other[1].bias.any()
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in other.named_parameters()]
    plain = fxprune.Pruner(copy.deepcopy(other), ROWS)
    assert plain.step() == 0.5


@pytest.mark.parametrize("kind", [*MODELS, "depthwise"])
def test_a_plan_goes_on_other_models_when_its_own_has_been_pruned(kind):
    models = {**MODELS, "depthwise": (depthwise, IMAGE)}
    build, x = models[kind]
    torch.manual_seed(0)
    net, other = awake(build()), awake(build(), seed=1)
    plan = fxprune.plan(net, x)
    small, masked = plan.apply(other), plan.mask(other)
    pruner = fxprune.Pruner(net, x, also=[again := copy.deepcopy(other)])
    pruner.step()
    for found, wanted in ((again, small), (plan.apply(other), small), (plan.mask(other), masked)):
        assert found.state_dict().keys() == wanted.state_dict().keys()
        assert difference(run(found, x), run(wanted, x)) == 0


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.Hardswish(),
        nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1),
    )  # fmt: skip


def test_what_a_step_makes_where_nothing_has_a_gradient_can_be_trained():
    net = conv_net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    train(net, optimizer, IMAGE)
    pruner = fxprune.Pruner(net, IMAGE, optimizer=optimizer)
    with torch.inference_mode():
        pruner.step()
        small = fxprune.prune(net, IMAGE)
    train(net, optimizer, IMAGE)
    train(small, torch.optim.SGD(small.parameters(), 0.1), IMAGE)


@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"calibration": [IMAGE.float()]}])
def test_under_autocast_what_is_folded_is_as_precise_as_without(settings):
    net = conv_net().float()
    plan = fxprune.plan(net, IMAGE.float(), **settings)
    wanted = plan.apply(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = plan.apply(net)
        assert fxprune.Pruner(net, IMAGE.float(), **settings).step() == 0.5
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_model_in_training_mode_keeps_its_statistics_and_random_numbers():
    net = conv_net().train()
    net.insert(3, nn.Dropout())
    net[2].eval()
    mean = net[1].running_mean.clone()
    state = torch.get_rng_state()
    pruner = fxprune.Pruner(net, IMAGE)
    pruner.step()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(net[1].running_mean, mean[pruner.kept["1.running_mean"][0]])
    assert [m.training for m in net] == [True, True, False, *[True] * 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_floats(dtype):
    net = conv_net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    pruner = fxprune.Pruner(net, IMAGE.to(dtype), optimizer=optimizer)
    train(net, optimizer, IMAGE.to(dtype))
    assert pruner.step() == 0.5
    train(net, optimizer, IMAGE.to(dtype))
    assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {dtype}


# -- all or nothing -------------------------------------------------------------------------------

STAGES = FAULTS | {
    "prove": (pruner, "prove"), "cuts": (pruner, "cuts"), "states": (pruner, "install"),
    "groups": (pruner, "regroup"), "begin": (optimizer_state, "_begin"),
    "entries": (rewriting.Journal, "entries"), "drop": (rewriting.Journal, "drop"),
}  # fmt: skip


def held(optimizer):
    """All of an optimizer, bit for bit."""
    groups = [{k: list(v) if k == "params" else v for k, v in g.items()}
              for g in optimizer.param_groups]  # fmt: skip
    state = [(id(p), list(s), [(id(v), v.clone()) for v in s.values()])
             for p, s in optimizer.state.items()]  # fmt: skip
    return groups, state


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple, dict)):
        first, second = (list(x.values()) if isinstance(x, dict) else list(x) for x in (a, b))
        return len(first) == len(second) and all(map(same, first, second))
    return a == b


@pytest.mark.filterwarnings("ignore::fxprune.PruningWarning")
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_moment_leaves_model_average_and_optimizer_bit_for_bit(stage, monkeypatch):
    monkeypatch.setitem(FAULTS, stage, STAGES[stage])
    number = 0
    while True:
        number += 1
        model, calls = everything(), []
        average = AveragedModel(model)
        optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
        optimizer.step()
        prove = stage in ("prove", "mask", "record", "deepcopy")
        steps = fxprune.Pruner(model, X, optimizer=optimizer, also=[average], verify=prove)
        shots, before = [Snapshot(model), Snapshot(average)], held(optimizer)
        with pytest.MonkeyPatch.context() as patch:
            inject(patch, stage, number, calls)
            try:
                steps.step()
            except (Fault, fxprune.PruningError) as error:
                assert isinstance(error, Fault) or isinstance(error.__cause__, Fault)
            else:
                break
        assert [shot.differences() for shot in shots] == [[], []]
        assert same(before, held(optimizer))
        assert steps.history == [] and steps.kept == {} and steps.sparsity == 0
    assert number > 1, f"{stage} never ran"
    assert steps.sparsity == pytest.approx(0.5)


def test_warnings_that_are_errors_change_nothing():
    model = everything()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    steps = fxprune.Pruner(model, X, optimizer=optimizer)
    before, state = Snapshot(model), held(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PruningWarning)
        with pytest.raises(PruningWarning, match="new optimizer state"):
            steps.step()
    assert before.differences() == [] and same(state, held(optimizer))


def test_what_cannot_be_is_said_before_any_training():
    net, twin = conv_net(), conv_net()
    for settings, message in (
        ({"spasity": 0.5}, "spasity is no setting of a plan; did you mean sparsity"),
        ({"inplace": True}, "inplace is no setting"), ({"sparsity": 1.5}, "not a fraction"),
        ({"sparsity": {"0": 2}}, "not a fraction"), ({"sparsity": {"nothing": 0.5}}, "matches no"),
        ({"schedule": "quartic"}, "'cubic' or sparsities"), ({"steps": 0}, "positive integer"),
        ({"schedule": "once", "steps": 3}, "takes one step"), ({"verify": 1}, "neither True"),
        ({"schedule": [0.5], "steps": 2}, "says that itself"), ({"schedule": []}, "sequence"),
        ({"schedule": [0.5], "sparsity": 0.5}, "says that itself"), ({"schedule": 3}, "sequence"),
        ({"schedule": [0.5, 1.0]}, "not a fraction"), ({"round_to": 0}, "positive"),
        ({"importance": 3}, "importance=3 is unknown"),
        ({"importance": {"0": [1.0] * 16}, "steps": 2}, "'0' are of the units that there are now"),
        ({"importance": Taylor(iter([IMAGE]), loss=F.mse_loss), "steps": 2}, "an iterator"),
        ({"importance": {"*": Wanda(iter([IMAGE]))}, "schedule": lambda step: 0.5}, "an iterator"),
        ({"schedule": [0.5, 0.25]}, "falls"), ({"also": nn.Linear(2, 2)}, "no other model"),
        ({"also": [net]}, "the model itself"), ({"also": nn.DataParallel(net)}, "the model itself"),
        ({"also": [twin, AveragedModel(net), twin]}, "stands there twice"),
        ({"calibration_mode": "parallel"}, "pass both"),
        ({"importance": "reconstruction"}, "pass calibration="),
    ):  # fmt: skip
        with pytest.raises(SettingError, match=message):
            fxprune.Pruner(net, IMAGE, **settings)
    with pytest.raises(ModelError, match="masked"):
        fxprune.Pruner(fxprune.plan(net, IMAGE).mask(net), IMAGE)
    with pytest.raises(SettingError, match="not a fraction"):
        fxprune.Pruner(net, IMAGE, schedule=lambda step: 1.0).step()
    with pytest.raises(SettingError, match="sparsity=None is not a fraction"):
        fxprune.Pruner(net, IMAGE, schedule=lambda step: None).step()
    with pytest.raises(SettingError, match="schedule raised TypeError for step 1"):
        fxprune.Pruner(net, IMAGE, schedule=lambda: 0.5).step()
    pruner = fxprune.Pruner(net, IMAGE, steps=4)
    pruner.step()
    assert repr(pruner) == (
        "Pruner(Sequential, step 1 of 4, 30.0% of the units gone, "
        f"{sum(p.numel() for p in net.parameters()):,} parameters)"
    )
