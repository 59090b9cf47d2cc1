"""The architectures of the zoo one after another: all tests of one run before those of the next, so that it is attached
once, whichever of several workers it falls to."""

import pytest

from .catalogue import BY_NAME
from .checks import Subject, subject


@pytest.fixture(scope="session", params=BY_NAME)
def it(request) -> Subject:
    return subject(request.param)
