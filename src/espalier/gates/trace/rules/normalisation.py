"""Rules: batch, layer and group normalisation."""

from __future__ import annotations

from espalier.gates.trace.rules.call import Call, Result, rule

FIXED = "normalises a tensor of fixed size"


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "batch_norm")
@rule("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update")
def batch_norm(call: Call) -> Result:
    """Channel by channel: statistics and affine go with the channel."""
    p, x = call.p, call.x.activation()
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "batch normalised")
    p.beside(atoms, call.layouts(call.args[1:5]), FIXED)
    return x


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(call: Call) -> Result:
    why, n = "layer normalisation over the axis", len(call.x.shape)
    call.p.beside(None, call.layouts(call.args[2:4]), why)
    return call.p.mixed_all(call.x.activation(), range(n - len(call.args[1]), n), why)


@rule("native_group_norm")
def group_norm(call: Call) -> Result:
    """Statistics over groups of channels: a whole group is one unit."""
    p, x = call.p, call.x.activation()
    groups: int = call.args[6]
    x = p.mixed_all(x, range(2, len(x.shape)), "normalised over")
    x, atoms = p.only(x, 1, "group normalised")
    if atoms is not None:
        inside = atoms.reshape(groups, -1)
        if groups == 1:
            p.atoms.freeze(atoms, f"group normalisation over all channels (in {p.where})")
        elif inside.shape[1] > 1:
            p.atoms.tie(inside[:, :1], inside)
            p.atoms.joined[atoms] = True
    p.beside(atoms, call.layouts(call.args[1:3]), FIXED)
    return x
