"""What a model does with its tensors: one forward pass, which indices go together in it, and what was multiplied."""

from espalier.gates.trace.atoms import Array
from espalier.gates.trace.rules import Event
from espalier.gates.trace.trace_record import Example, TensorInfo, Trace, tensors_in
from espalier.gates.trace.watch import trace

__all__ = ["Array", "Event", "Example", "TensorInfo", "Trace", "tensors_in", "trace"]
