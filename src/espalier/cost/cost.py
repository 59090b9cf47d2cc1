"""What a mask costs: a sum of terms, each a constant times a product of linear forms or of functions of widths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from espalier.cost.expectation import Expectation
from espalier.cost.widths import Table, WidthExpectation, WidthFunction, WidthTerms, check_apart, check_weights
from espalier.space import BadInput, BadType, Space

Weights = float | np.ndarray  # one weight for a whole run of entries, or one for each


@dataclass(frozen=True, eq=False)
class Form:
    """A non-negative linear form ``constant + sum_i w_i m_i``, kept as runs of entries.

    ``pieces``: ``(start, stop, weights)`` each, `weights` one number or one per entry of the run. Runs may overlap:
    they add. A whole layer is one run, whatever its width.

    >>> form = Form.run(0, 784) + Form.run(784, 800, 9.0) + 3.0      # m_0 + .. + m_783 + 9 (m_784 + ..) + 3
    >>> len(form.pieces), form.constant
    (2, 3.0)
    """

    pieces: tuple[tuple[int, int, Weights], ...]
    constant: float = 0.0

    def __post_init__(self) -> None:
        check_weights(np.asarray(self.constant, dtype=np.float64), "the constant of a linear form")
        for start, stop, weights in self.pieces:
            if not 0 <= start < stop:
                raise BadInput(f"a linear form runs over entries start < stop, not {start} to {stop}")
            values = np.asarray(weights, dtype=np.float64)
            if values.ndim > 1 or (values.ndim == 1 and len(values) != stop - start):
                raise BadInput(f"entries {start} to {stop} need {stop - start} weights, not shape {values.shape}")
            check_weights(values, f"the weight of entries {start} to {stop}")

    @classmethod
    def run(cls, start: int, stop: int, weight: float = 1.0) -> Form:
        """The same weight for entries ``start`` to ``stop``."""
        return cls(((start, stop, float(weight)),))

    @classmethod
    def of(cls, weights: Sequence[float] | np.ndarray | Tensor, constant: float = 0.0) -> Form:
        """One weight for each entry of the space, from the first."""
        values = _vector(weights, "the weights of a linear form")
        return cls(((0, len(values), values),), constant)

    def __add__(self, other: Form | float) -> Form:
        if isinstance(other, Form):
            return Form(self.pieces + other.pieces, self.constant + other.constant)
        return Form(self.pieces, self.constant + float(other))

    __radd__ = __add__

    def __mul__(self, factor: float) -> Form:
        factor = _positive(factor)
        return Form(tuple((a, b, w * factor) for a, b, w in self.pieces), self.constant * factor)

    __rmul__ = __mul__


@dataclass(frozen=True, eq=False)
class Cost:
    """What a mask costs. Called on a mask it is the cost; called on theta it is exactly the expected cost.

    Made by :meth:`linear`, :meth:`product` (linear forms) and :meth:`of_widths` (functions of the number of open gates
    of a layer); costs add, and scale by positive numbers.

    The product of two forms that share entries is reduced by ``m^2 = m``, and by ``m_j m_k = 0`` for two options of
    one choice; for that the cost must know the choices, see :meth:`over`.

    >>> import torch
    >>> units = Cost.linear([1.0, 1.0, 1.0])
    >>> units(torch.tensor([1.0, 0.0, 1.0])).item()
    2.0
    >>> layer = Cost.product([Form.run(0, 2), Form.run(2, 3, 5.0) + 1.0], d=3)     # (m0 + m1) (5 m2 + 1)
    >>> (layer + 2 * units)(torch.tensor([0.5, 0.5, 0.5])).item()                   # exact: (1) (3.5) + 2 (1.5)
    6.5
    """

    d: int
    terms: tuple[tuple[float, tuple[Form, ...]], ...]
    space: Space | None = None
    width_terms: WidthTerms = ()
    label: str = ""  # of a cost that was measured, by which its measurements are found again
    _expectations: dict[torch.device, tuple[Expectation, WidthExpectation | None]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def linear(cls, c: object) -> Cost:
        """``sum_i c_i m_i``, the paper's cost."""
        values = _vector(c, "the cost")
        check_weights(values, "the cost of a gate")
        if not values.any():
            raise BadInput("every cost is zero, so nothing would be controlled; give at least one gate a positive cost")
        return cls(len(values), ((1.0, (Form.of(values),)),))

    @classmethod
    def product(cls, forms: Iterable[Form], *, d: int, scale: float = 1.0) -> Cost:
        """``scale`` times the product of the forms, over a space of ``d`` entries."""
        factors = tuple(forms)
        for form in factors:
            for start, stop, _ in form.pieces:
                if stop > d:
                    raise BadInput(f"a linear form over entries {start} to {stop} does not fit a space of {d} entries")
        return cls(d, ((_positive(scale), factors),))

    @classmethod
    def of_widths(cls, space: Space, functions: Mapping[str | tuple[str, ...], Table], *, scale: float = 1.0) -> Cost:
        """``scale`` times a product of functions of widths: a measured latency, say, which goes up in steps.

        functions: for the name of a group of bits what its width costs, a function of the number of open gates or the
            list of its values at 0, 1, .. up to all of them; never falling. A tuple of names stands for the sum of
            their widths, as where one layer reads several. Groups of one product share no gate.

        >>> import torch
        >>> from espalier.space import Bits, Space
        >>> space = Space([Bits("fc1", 3), Bits("fc2", 2)])
        >>> tiles = Cost.of_widths(space, {"fc1": lambda width: -(-width // 2), "fc2": [1.0, 1.0, 5.0]})
        >>> tiles(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])).item()              # two tiles of two, times 5
        10.0
        >>> tiles(torch.tensor([0.5, 0.5, 0.5, 1.0, 0.0])).item()              # (0 + 3 + 3 + 2) / 8, times 1
        1.0
        """
        if not isinstance(functions, Mapping) or not functions:
            raise BadType(f"functions are a dict from the name of a group to what its width costs, not {functions!r}")
        factors = [WidthFunction.read(space, names, table) for names, table in functions.items()]
        check_apart(functions, factors)
        return cls(space.d, (), space, ((_positive(scale), tuple(factors)),))

    def chord(self) -> Cost:
        """The multilinear cost in which every function of a width is the straight line between its ends."""
        terms = tuple(
            (scale, tuple(Form(tuple((a, b, f.mean_step) for a, b in f.runs), float(f.table[0])) for f in factors))
            for scale, factors in self.width_terms
        )
        return replace(self, terms=self.terms + terms, width_terms=())

    def over(self, space: Space) -> Cost:
        """The same cost, which now knows which entries are options of one choice."""
        if self.space is space:
            return self
        if space.d != self.d:
            raise BadInput(f"this cost is of {self.d} entries, the space has {space.d}; give one cost for each entry")
        if self.space is not None and self.space != space:
            raise BadInput(f"this cost belongs to another space: {self.space!r}, not {space!r}")
        return replace(self, space=space)

    def __add__(self, other: Cost) -> Cost:
        if not isinstance(other, Cost):
            return NotImplemented
        if other.d != self.d:
            raise BadInput(f"costs of {self.d} and of {other.d} entries do not add; they are of different spaces")
        if self.space is not None and other.space is not None and self.space != other.space:
            raise BadInput("costs of two different spaces do not add")
        space, width_terms = self.space or other.space, self.width_terms + other.width_terms
        return Cost(self.d, self.terms + other.terms, space, width_terms)

    def __mul__(self, factor: float) -> Cost:
        factor = _positive(factor)
        terms = tuple((scale * factor, forms) for scale, forms in self.terms)
        return replace(self, terms=terms, width_terms=tuple((s * factor, f) for s, f in self.width_terms), label="")

    __rmul__ = __mul__

    def on(self, device: torch.device) -> tuple[Expectation, WidthExpectation | None]:
        """The cost made ready for evaluation on a device (kept): its linear forms, and its functions of widths."""
        if device not in self._expectations:
            forms = Expectation.build(self.d, self.terms, self.space, device)
            widths = WidthExpectation(self.d, self.width_terms, device) if self.width_terms else None
            self._expectations[device] = forms, widths
        return self._expectations[device]

    def __call__(self, theta: Tensor) -> Tensor:
        """theta or mask: ``(*B, d)``. Returns the (expected) cost ``(*B)``, float64."""
        theta = self._entries(theta)
        forms, widths = self.on(theta.device)
        return forms.value(theta) if widths is None else forms.value(theta) + widths.value(theta)

    def gradient(self, theta: Tensor) -> Tensor:
        """theta or mask: ``(*B, d)``. Returns dcost/dtheta ``(*B, d)``, float64; at a mask, what each gate adds."""
        theta = self._entries(theta)
        forms, widths = self.on(theta.device)
        return forms.gradient(theta) if widths is None else forms.gradient(theta) + widths.gradient(theta)

    def _entries(self, theta: Tensor) -> Tensor:
        if not isinstance(theta, Tensor):
            raise BadType(f"a cost is of a tensor, not of {type(theta).__name__}")
        if theta.ndim < 1 or theta.shape[-1] != self.d:
            raise BadInput(f"this cost is of {self.d} entries, not of shape {tuple(theta.shape)}")
        return theta.to(torch.float64)


def _vector(values: object, what: str) -> np.ndarray:
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu().double().numpy()
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadType(f"{what} is a one-dimensional list of numbers: {error}") from None
    if array.ndim != 1 or not len(array):
        raise BadInput(f"{what} is a one-dimensional list of numbers, not shape {array.shape}")
    return array


def _positive(factor: float) -> float:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise BadType(f"a cost is scaled by a number, not by {factor!r}")
    if not (math.isfinite(factor) and factor > 0):
        raise BadInput(f"a cost is scaled by a positive, finite number, not by {factor!r}")
    return float(factor)
