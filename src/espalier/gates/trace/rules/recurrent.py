"""Rules: the fused steps of recurrent networks, as CUDA runs them. On the CPU such a step is products and views."""

from __future__ import annotations

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Result, rule, wrap


@rule("_thnn_fused_gru_cell")
def fused_gru_cell(call: Call) -> Result:
    """CUDA's GRU step: three tiles of gates, tied with the hidden state and with each other."""
    p = call.p
    shape = call.shape(0)
    gates = p.merged([call.of(t) for t in call.args[:2]], call.of(call.args[0]).shape, "added")
    for value in call.args[3:5]:
        if hasattr(value, "shape"):
            gates = p.merged([gates, call.of(value)], gates.shape, "added")
    return [_tiled(call, gates, 3, call.of(call.args[2]), shape), None]


def _tiled(call: Call, gates: Layout, count: int, state: Layout, shape: tuple[int, ...]) -> Layout:
    """Equal tiles of the last axis, tied with each other and with the state they update."""
    p = call.p
    block = gates.at(len(gates.shape) - 1)
    if block is None or len(block.dims) > 1:
        p.freeze(gates, "combined with a tensor of fixed size")
        p.freeze(state, "combined with a tensor of fixed size")
        return Layout(shape)
    tiles = block.atoms.reshape(count, -1)
    p.atoms.tie(tiles[:1], tiles)
    last = wrap(-1, len(shape))
    return p.merged([Layout(shape, (Block((last,), tiles[0]),)), state], shape, "combined")


@rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(call: Call) -> Result:
    """CUDA's LSTM step: four tiles of gates, tied with the cell and with each other."""
    p = call.p
    shape = call.shape(0)
    gates = p.merged([call.of(t) for t in call.args[:2]], call.of(call.args[0]).shape, "added")
    for value in call.args[3:5]:
        if hasattr(value, "shape"):
            gates = p.merged([gates, call.of(value)], gates.shape, "added")
    out = _tiled(call, gates, 4, call.of(call.args[2]), shape)
    return [out, out, None]
