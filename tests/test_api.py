"""The public interface: what exists, and with which parameters."""

from __future__ import annotations

import inspect

import fxprune


def test_public_signatures_are_pinned():
    settings = (
        "sparsity: 'float | Mapping[Any, float] | None' = None, target: 'Target | None' = None, "
        "ignore: 'Iterable[Any] | str | type | nn.Module' = (), importance: 'Any' = 'l2', "
        "scope: 'str' = 'local', min_width: 'Any' = None, max_sparsity: 'Any' = None, "
        "round_to: \"int | Literal['auto']\" = 1, "
        "bias: 'str | None' = None, "
        "exact: 'bool' = False, "
        "attention: 'str' = 'heads', outputs: 'str | Iterable[str] | None' = None, "
        "patterns: 'Iterable[Pattern]' = (), calibration: 'Iterable[Any] | None' = None, "
        "calibration_batches: 'int | None' = None, calibration_mode: 'str' = 'sequential'"
    )
    head = "(model: 'nn.Module', example_input: 'Any'"
    signature = {name: str(inspect.signature(getattr(fxprune, name)))
                 for name in ("plan", "trace", "prune")}  # fmt: skip
    assert signature == {
        "plan": f"{head}, *, {settings}) -> 'PruningPlan'",
        "trace": f"{head}) -> 'fx.GraphModule'",
        "prune": f"{head}, *, {settings}, inplace: 'bool' = False, "
        "as_graph: 'bool' = False, verify: 'bool' = True) "
                 "-> 'nn.Module'",
    }  # fmt: skip
    assert str(inspect.signature(fxprune.check_pattern)) == (
        "(pattern: 'Pattern', module: 'nn.Module', example_input: 'Any', *, "
        "raise_exception: 'bool' = True) -> 'PatternCheck'"
    )
    assert list(inspect.signature(fxprune.register).parameters) == ["targets", "override", "what"]
    assert str(inspect.signature(fxprune.benchmark)) == (
        "(before: 'nn.Module', after: 'nn.Module', example_input: 'Any', *, mode: 'str' = 'eager', "
        "device: 'torch.device | str | None' = None, dtype: 'torch.dtype | None' = None, "
        "channels_last: 'bool' = False, threads: 'int | None' = None, seconds: 'float' = 1.0) "
        "-> 'BenchmarkResult'"
    )
    assert str(inspect.signature(fxprune.Pruner)) == (
        f"{head}, *, optimizer: 'Any' = None, "
        "schedule: 'str | Callable[[int], float] | Sequence[float]' = 'cubic', "
        "steps: 'int | None' = None, also: 'Iterable[nn.Module] | nn.Module | None' = None, "
        "verify: 'bool' = True, **settings: 'Any') -> 'None'"
    )
    path = "path: 'str | os.PathLike[str]'"
    again = "*, example_input: 'Any' = None, patterns: 'Iterable[Pattern]' = ()"
    assert str(inspect.signature(fxprune.save)) == f"(model: 'nn.Module', {path}) -> 'None'"
    assert str(inspect.signature(fxprune.load)) == (
        f"(model: 'nn.Module', {path}, {again}) -> 'nn.Module'"
    )
    assert str(inspect.signature(fxprune.PruningPlan.save)) == f"(self, {path}) -> 'None'"
    assert str(inspect.signature(fxprune.PruningPlan.load)) == (
        f"({path}, model: 'nn.Module', {again}) -> 'PruningPlan'"
    )
    for name, rest in (("mask", ""), ("apply", ", *, inplace: 'bool' = False")):
        found = str(inspect.signature(getattr(fxprune.PruningPlan, name)))
        assert found == f"(self, model: 'nn.Module'{rest}) -> 'nn.Module'"


def test_all_exports_are_pinned_and_exist():
    assert fxprune.__all__ == [
        "BenchmarkResult", "ChannelGroup", "FileError", "InputError", "LatencyTable", "ModelError",
        "Pattern", "PatternError", "PlanError", "ProofError", "Pruner", "PruningError",
        "PruningPlan", "PruningWarning", "Reached", "SettingError", "Target", "benchmark",
        "check_pattern", "compact", "importance", "load", "masks", "pattern", "patterns", "plan",
        "prune", "recalibrate_batchnorm", "register", "save", "trace", "unregister",
    ]  # fmt: skip
    assert all(hasattr(fxprune, name) for name in fxprune.__all__)
