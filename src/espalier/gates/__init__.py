"""Gates on any model: placed by hand or found, masked at their consumers, counted exactly."""

from espalier.gates.attach import attach
from espalier.gates.costs import register as register_cost
from espalier.gates.find import find_groups
from espalier.gates.find import register as register_kind
from espalier.gates.gate import Gate, Mixed
from espalier.gates.gated import Gated
from espalier.gates.recalibrate import recalibrate

__all__ = ["Gate", "Gated", "Mixed", "attach", "find_groups", "recalibrate", "register_cost", "register_kind"]
