"""Hypothesis profiles: ``ci`` by default, ``--hypothesis-profile=long`` for thousands of cases."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings

import fxprune
from fxprune.mending import mend as mending
from fxprune.mending.source_edits import CannotPatch

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("ci", max_examples=500, derandomize=True, **_COMMON)
settings.register_profile("quick", max_examples=50, derandomize=True, **_COMMON)
settings.register_profile("long", max_examples=10_000, **_COMMON)
settings.load_profile("ci")
torch.set_num_threads(1)
warnings.simplefilter("ignore", fxprune.PruningWarning)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def from_the_graph(monkeypatch):
    """New code is a forward that is written from the recorded graph, as where the source of the
    model does not tell where its sizes are."""

    def patch(*args):
        raise CannotPatch

    monkeypatch.setattr(mending, "patch", patch)
