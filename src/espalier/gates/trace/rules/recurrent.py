"""Rules: the fused steps of recurrent networks, as CUDA runs them. On the CPU such a step is products and views."""

from __future__ import annotations

from espalier.gates.trace.layout import Block, Layout
from espalier.gates.trace.rules.call import Call, Result, rule, wrap


@rule("_thnn_fused_gru_cell")
def fused_gru_cell(call: Call) -> Result:
    """CUDA's GRU step: three tiles of gates, tied with the hidden state and with each other."""
    return [_tiled(call, 3), None]


@rule("_thnn_fused_lstm_cell")
def fused_lstm_cell(call: Call) -> Result:
    """CUDA's LSTM step: four tiles of gates, tied with the cell and with each other."""
    out = _tiled(call, 4)
    return [out, out, None]


def _tiled(call: Call, count: int) -> Layout:
    """``count`` equal tiles of the gates' last axis, tied with each other and with the state they update.

    The operands: the gates from the input and from the hidden state, the state, and perhaps two biases.
    """
    p, shape = call.p, call.shape(0)
    gates = p.merged([call.of(t) for t in call.args[:2]], call.of(call.args[0]).shape, "added")
    for bias in call.args[3:5]:
        if hasattr(bias, "shape"):
            gates = p.merged([gates, call.of(bias)], gates.shape, "added")
    state = call.of(call.args[2])
    block = gates.at(len(gates.shape) - 1)
    if block is None or len(block.dims) > 1:
        p.freeze(gates, "combined with a tensor of fixed size")
        p.freeze(state, "combined with a tensor of fixed size")
        return Layout(shape)
    tiles = block.atoms.reshape(count, -1)
    p.atoms.tie(tiles[:1], tiles)
    last = wrap(-1, len(shape))
    return p.merged([Layout(shape, (Block((last,), tiles[0]),)), state], shape, "combined")
