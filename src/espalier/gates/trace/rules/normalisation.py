"""Rules: batch, layer and group normalisation."""

from __future__ import annotations

from typing import Any

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Result, rule


def batch_norm(call: Call) -> Result:
    """Channel by channel: statistics and affine go with the channel."""
    p, x = call.p, call.x.activation()
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "batch normalised")
    for value in call.args[1:5]:
        if hasattr(value, "shape"):
            layout = call.of(value)
            if atoms is None:
                p.freeze(layout, "normalises a tensor of fixed size")
            else:
                p.merged([Layout((x.shape[1],), (Block((0,), atoms),)), layout], (x.shape[1],), "normalised")
    return _first(call, x)


def _first(call: Call, x: Layout) -> Result:
    """The first result has the layout; saved statistics are read by the backward pass alone."""
    return [x, *[None] * (len(call.out) - 1)] if isinstance(call.out, (tuple, list)) else x


for _name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm"):
    rule(_name)(batch_norm)
for _name in ("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update"):
    rule(_name)(batch_norm)


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(call: Call) -> Result:
    p, x = call.p, call.x.activation()
    n = len(x.shape)
    size = len(call.args[1])
    x = p.mixed_all(x, range(n - size, n), "layer normalisation over the axis")
    for value in call.args[2:4]:
        if hasattr(value, "shape"):
            p.freeze(call.of(value), "layer normalisation over the axis")
    return _first(call, x)


@rule("native_group_norm")
def group_norm(call: Call) -> Result:
    """Statistics over groups of channels: a whole group is one unit."""
    p, x = call.p, call.x.activation()
    groups: int = call.args[6]
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "group normalised")
    params: list[Any] = [call.of(v) for v in call.args[1:3] if hasattr(v, "shape")]
    if atoms is None:
        for layout in params:
            p.freeze(layout, "normalises a tensor of fixed size")
        return _first(call, x)
    inside = atoms.reshape(groups, -1)
    if groups == 1:
        p.atoms.freeze(atoms, f"group normalisation over all channels (in {p.where})")
    elif inside.shape[1] > 1:
        p.atoms.tie(inside[:, :1], inside)
        p.atoms.joined[atoms] = True
    for layout in params:
        p.merged([Layout((x.shape[1],), (Block((0,), atoms),)), layout], (x.shape[1],), "normalised")
    return _first(call, x)
