"""What each operation does to layouts: rules by kind of operation, which enter themselves in the table ``RULES``."""

from espalier.gates.trace.rules import composite, products, views
from espalier.gates.trace.rules.call import RULES, Call, Event
from espalier.gates.trace.rules.elementwise import pointwise

__all__ = ["RULES", "Call", "Event", "composite", "pointwise", "products", "views"]
