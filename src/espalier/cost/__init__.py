"""Multilinear cost: exact on masks, exact in expectation, with an analytic gradient."""

from espalier.cost.cost import Cost, Form

__all__ = ["Cost", "Form"]
