"""The one check all of the data layer shares: a whole number, not too small."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from espalier.space import BadInput, BadType


def check_whole(what: str, value: object, least: int) -> int:
    """``value`` as an int, if it is one (NumPy's too, a bool not) and at least ``least``.

    >>> check_whole("the batch", 32, 1)
    32
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise BadType(f"{what} is an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:  # a tensor of several values or of floats has the method, and no integer behind it
        raise BadType(f"{what} is an integer, not {value!r}") from None
    if number < least:
        raise BadInput(f"{what} is at least {least}, not {number}")
    return number
