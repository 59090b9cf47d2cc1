"""The compact model: a plan of what stays, its application to a copy, and keeping the result on disk."""

from espalier.compact.plan import Plan
from espalier.compact.store import load, save

__all__ = ["Plan", "load", "save"]
