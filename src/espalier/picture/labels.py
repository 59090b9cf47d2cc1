"""Numbers as people write them: powers of two, raised exponents, shares."""

from __future__ import annotations

import math
import re

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def whole_power(value: float) -> float:
    """A power of two that was given in six digits, as that power of two; any other number as it is.

    >>> whole_power(0.00195312) == 2**-9, whole_power(0.3), whole_power(0.0)
    (True, 0.3, 0.0)
    """
    if value == 0 or not math.isfinite(value):
        return value
    nearest = math.copysign(2.0 ** round(math.log2(abs(value))), value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-5) else value


def power(value: float) -> str:
    """A penalty as the paper writes it.

    >>> power(2**-6), power(-1.0), power(0.0), power(0.3)
    ('2^-6', '-2^0', '0', '0.3')
    """
    fraction, exponent = math.frexp(abs(value))
    if fraction != 0.5 or not -40 < exponent < 42:
        return f"{value:g}" if value else "0"
    return f"{'-' if value < 0 else ''}2^{exponent - 1}"


def raised(text: str) -> str:
    """Powers as they are printed.

    >>> raised("penalty -2^-3")
    'penalty -2⁻³'
    """
    return re.sub(r"\^(-?\d+)", lambda exponent: exponent[1].translate(RAISED), text)


def share_label(share: float) -> str:
    """A share with one decimal, all and nothing without.

    >>> share_label(0.4231), share_label(1.0), share_label(0.0), share_label(0.99996)
    ('42.3%', '100%', '0%', '>99.9%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.1%" if share < 0.0005 else ">99.9%" if share > 0.9995 else f"{share:.1%}"
