"""The errors a user of Espalier can meet: each names the thing, the value and the way out."""


class EspalierError(Exception):
    """Anything Espalier refuses to do."""


class BadInput(EspalierError, ValueError):
    """An argument that cannot be used; nothing was changed."""


class BadType(BadInput, TypeError):
    """An argument of a type or dtype that cannot be used; nothing was changed."""


class BadMask(BadInput):
    """A mask of the wrong length or with values other than 0 and 1."""


class BadMaskType(BadMask, BadType):
    """A mask of a type or dtype that cannot be used."""


class NoGates(EspalierError, ValueError):
    """A model in which nothing can be gated."""


class Unreachable(EspalierError, ValueError):
    """A target that no structure of the space can meet."""


class Diverged(EspalierError, ArithmeticError):
    """Every loss of an update was infinite or not a number."""


class Corrupt(EspalierError, ValueError):
    """A file that is truncated, altered, or of a format this version does not know."""


class RankLost(EspalierError, RuntimeError):
    """Another process of those that train one run together has ended or hangs."""
