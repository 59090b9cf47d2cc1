"""What the paper printed for unit selection (Table 1) and for connection selection (Table 2), to stand beside ours."""

from __future__ import annotations

from dataclasses import dataclass

NETWORK, EPOCHS = (784, 784, 784, 784, 10), 500
DENSENET, DENSENET_EPOCHS = ("DenseNet", 40, 12), 300


@dataclass(frozen=True)
class Printed:
    """A row, of medians. Of Table 1: the "weight usage rate", which is the share of kept units, and the units of the
    three layers; of Table 2: the share of the weights of all connections, and the connections of the three blocks, of
    91 each."""

    share: float
    counts: tuple[int, int, int]


TABLE_1 = {
    2**-6: Printed(0.066, (92, 31, 24)),
    2**-7: Printed(0.261, (340, 141, 126)),
    2**-8: Printed(0.578, (599, 380, 379)),
    2**-9: Printed(0.777, (704, 544, 567)),
    0.0: Printed(0.937, (770, 717, 724)),
    -(2**-3): Printed(1.0, (784, 784, 784)),
}
TABLE_2 = {
    2**-2: Printed(0.158, (36, 6, 20)),
    2**-3: Printed(0.241, (45, 8, 49)),
    2**-4: Printed(0.423, (57, 39, 67)),
    2**-5: Printed(0.675, (59, 61, 76)),
    2**-6: Printed(0.803, (65, 64, 80)),
    -1.0: Printed(1.0, (91, 91, 91)),
}
