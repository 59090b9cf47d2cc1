"""Shipping: the small network of a result or a run in a folder of its own, checked and timed, with a card."""

from espalier.ship.delivery import FORMATS, Shipped, ship

__all__ = ["FORMATS", "Shipped", "ship"]
