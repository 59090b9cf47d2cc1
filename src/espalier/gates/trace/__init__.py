"""What a model does with its tensors: one forward pass, which indices go together in it, and what was multiplied."""

from espalier.gates.trace.layout import Array
from espalier.gates.trace.rules import Event
from espalier.gates.trace.watch import Example, TensorInfo, Trace, eval_mode, modes_kept, tensors_in, trace, values_kept

__all__ = [
    "Array", "Event", "Example", "TensorInfo", "Trace", "eval_mode", "modes_kept", "tensors_in", "trace", "values_kept",
]  # fmt: skip
