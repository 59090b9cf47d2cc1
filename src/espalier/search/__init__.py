"""The optimiser of theta: ask for masks, tell their losses. It knows no network."""

from espalier.search.search import Search

__all__ = ["Search"]
