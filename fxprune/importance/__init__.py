"""How much a unit matters: criteria, each of which gives a score to every unit of a group.

What has the lowest scores goes. ``importance=`` of :func:`fxprune.plan` is a criterion, the name of
one that needs no data (``"l1"``, ``"l2"``, ``"lamp"``, ``"fpgm"``, ``"bn_scale"``, ``"random"``), a
function of your own, or a mapping from group names (globs allowed) to criteria or to scores::

    fxprune.plan(model, x, importance=fxprune.importance.Magnitude(order=1, reduce="max"))
    fxprune.plan(model, x, importance=fxprune.importance.Taylor(loader, loss=F.cross_entropy))

A function of your own takes the list of :class:`Slices` that go with the units of a group, and
returns one score a unit; it may raise :class:`Unscored` with a reason, and the group stays whole.
"""

from .activations import Activation, Wanda
from .criterion import Context, Criterion, Importance, Unscored
from .gradients import Fisher, Taylor
from .named import NAMED, Scorer, changed, check, resolve, scores
from .slices import Slices, slices
from .weights import FPGM, LAMP, BNScale, Magnitude, Random

l1, l2, random, fpgm = (NAMED[name] for name in ("l1", "l2", "random", "fpgm"))

__all__ = [
    "FPGM",
    "LAMP",
    "NAMED",
    "Activation",
    "BNScale",
    "Context",
    "Criterion",
    "Fisher",
    "Importance",
    "Magnitude",
    "Random",
    "Scorer",
    "Slices",
    "Taylor",
    "Unscored",
    "Wanda",
    "changed",
    "check",
    "resolve",
    "scores",
    "slices",
]
