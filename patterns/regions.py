"""torchvision's own ops: regions of an image, and convolutions that are told where to look."""

from __future__ import annotations

from fxprune.patterns.convolution import convolve, new_groups
from fxprune.patterns.pooling import windows
from fxprune.rules.registry import register


@register("torchvision::roi_align", "torchvision::roi_pool", kind="pool")
def regions(a, call):
    """y[box, c] = what of x[image of the box, c] lies in each part of the box."""
    a.freeze_all(call.channels(1), f"{call.name} reads boxes", call)
    y = windows(a, call, call.channels(), [0, 2, 3])
    several = isinstance(y, tuple)  # with the positions of each maximum
    # A box that reaches out of the image sees zeros there.
    return (a.bordered(y[0]), *y[1:]) if several else a.bordered(y)


@register("torchvision::deform_conv2d", kind="conv", bias=(4, "bias"), resize=new_groups(11))
def deformable_convolution(a, call):
    """y[o] = Σᵢ W[o, i] · x[i] at positions of the kernel that are moved, and weighed by a mask."""
    x, weight, groups = call.channels(), call.arg(1, "weight"), call.recorded(11, "groups")
    for i in (2, 3):
        a.freeze_all(call.channels(i), f"{call.name} reads where to look", call)
    if call.arg(12, "offset_groups") > 1:
        x = a.freeze_dims(x, [1], "its parts are looked for in places of their own", call)
    border = "pattern" if call.arg(13, "use_mask") else "padding"
    return convolve(
        a, call, x, weight, call.arg(4, "bias"), groups, transposed=False, border=border
    )
