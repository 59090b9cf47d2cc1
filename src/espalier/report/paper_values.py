"""What the paper printed for unit selection (Table 1) and for connection selection (Table 2), to stand beside ours."""

from __future__ import annotations

from dataclasses import dataclass

NETWORK = (784, 784, 784, 784, 10)
EPOCHS = 500


@dataclass(frozen=True)
class Printed:
    """share: the "weight usage rate", which is the share of kept units. units: medians of the three layers."""

    share: float
    units: tuple[int, int, int]


TABLE_1 = {
    2**-6: Printed(0.066, (92, 31, 24)),
    2**-7: Printed(0.261, (340, 141, 126)),
    2**-8: Printed(0.578, (599, 380, 379)),
    2**-9: Printed(0.777, (704, 544, 567)),
    0.0: Printed(0.937, (770, 717, 724)),
    -(2**-3): Printed(1.0, (784, 784, 784)),
}

DENSENET = ("DenseNet", 40, 12)
DENSENET_EPOCHS = 300


@dataclass(frozen=True)
class PrintedConnections:
    """share: of the weights of all connections. connections: medians of the three blocks, of 91 each."""

    share: float
    connections: tuple[int, int, int]


TABLE_2 = {
    2**-2: PrintedConnections(0.158, (36, 6, 20)),
    2**-3: PrintedConnections(0.241, (45, 8, 49)),
    2**-4: PrintedConnections(0.423, (57, 39, 67)),
    2**-5: PrintedConnections(0.675, (59, 61, 76)),
    2**-6: PrintedConnections(0.803, (65, 64, 80)),
    -1.0: PrintedConnections(1.0, (91, 91, 91)),
}


def far(ours: float, theirs: float) -> bool:
    """Whether a cell of Table 1 asks for a reason: further than 15% and than 12 units from the paper's."""
    return abs(ours - theirs) > max(0.15 * theirs, 12)
