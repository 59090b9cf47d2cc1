"""Gates on any model: placed by hand or found, masked at their consumers, counted exactly."""

from espalier.gates.attach import attach
from espalier.gates.gate import Gate
from espalier.gates.gated import Gated
from espalier.gates.recalibrate import recalibrate

__all__ = ["Gate", "Gated", "attach", "recalibrate"]
