"""Costs that are refused: which kind of error, and that it names the value and the way out."""

import numpy as np
import pytest
import torch

from espalier import BadInput, Bits, Choice, Cost, EspalierError, Form, Space

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: Cost.linear([1.0, -2.5]), ValueError, "-2.5"),
        (lambda: Cost.linear([1.0, NAN]), ValueError, "nan"),
        (lambda: Cost.linear([INF, 1.0]), ValueError, "inf"),
        (lambda: Cost.linear([0.0, 0.0]), ValueError, "positive"),
        (lambda: Cost.linear([]), ValueError, "shape"),
        (lambda: Cost.linear([[1.0]]), ValueError, "(1, 1)"),
        (lambda: Cost.linear(torch.tensor(3.0)), ValueError, "shape ()"),
        (lambda: Cost.linear(["a", "b"]), TypeError, "'a'"),
        (lambda: Cost.linear(None), EspalierError, "one-dimensional"),
        (lambda: Form.run(3, 3), ValueError, "3 to 3"),
        (lambda: Form.run(-1, 2), ValueError, "-1 to 2"),
        (lambda: Form.run(0, 2, -1.0), ValueError, "-1.0"),
        (lambda: Form.run(0, 2, NAN), ValueError, "nan"),
        (lambda: Form.run(0, 2) + -0.5, ValueError, "-0.5"),
        (lambda: Form(((0, 3, np.ones(2)),)), ValueError, "3 weights"),
        (lambda: Form.of([1.0]) * -1.0, ValueError, "-1.0"),
        (lambda: Cost.product([Form.run(0, 5)], d=4), ValueError, "4 entries"),
        (lambda: Cost.product([Form.run(0, 4)], d=4, scale=0.0), ValueError, "0.0"),
        (lambda: Cost.product([Form.run(0, 4)], d=4, scale=-2), ValueError, "-2"),
        (lambda: Cost.linear([1.0]) * INF, ValueError, "inf"),
        (lambda: Cost.linear([1.0]) * True, TypeError, "True"),
        (lambda: Cost.linear([1.0]) * "2", TypeError, "'2'"),
        (lambda: Cost.linear([1.0]) + Cost.linear([1.0, 1.0]), ValueError, "different spaces"),
        (lambda: Cost.linear([1.0]).over(Space([Bits("b", 2)])), ValueError, "the space has 2"),
        (
            lambda: (
                Cost.linear([1.0, 1]).over(Space([Bits("b", 2)])) + Cost.linear([1, 1]).over(Space([Choice("c", 2)]))
            ),
            ValueError,
            "different spaces",
        ),
        (
            lambda: Cost.linear([1.0, 1]).over(Space([Bits("b", 2)])).over(Space([Choice("c", 2)])),
            ValueError,
            "another space",
        ),
        (lambda: Cost.linear([1.0, 1.0])(torch.ones(3)), ValueError, "(3,)"),
        (lambda: Cost.linear([1.0, 1.0])(torch.tensor(1.0)), ValueError, "()"),
        (lambda: Cost.linear([1.0, 1.0])([1.0, 0.0]), TypeError, "list"),
        (lambda: Cost.linear([1.0, 1.0]).gradient(np.ones(2)), TypeError, "ndarray"),
    ],
)
def test_refused(make, kind, says):
    with pytest.raises(kind) as caught:
        make()
    assert isinstance(caught.value, BadInput)
    assert isinstance(caught.value, EspalierError)
    assert says in str(caught.value)


def test_a_cost_and_a_number_do_not_add():
    with pytest.raises(TypeError):
        Cost.linear([1.0]) + 3


def test_the_users_tensor_is_copied():
    c = torch.tensor([1.0, 2.0])
    cost = Cost.linear(c)
    c[0] = 100.0
    assert cost(torch.ones(2)).item() == 3.0
