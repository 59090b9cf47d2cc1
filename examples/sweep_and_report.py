"""Four sizes with two seeds each, trained as one batch, and a page about them. CPU, seconds; needs espalier[report]."""

from torch import nn

import espalier
from espalier import report


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


data = espalier.data.load("digits").flatten()
results = espalier.sweep(
    network, data, targets=[0.05, 0.1, 0.25, 0.5], seeds=[0, 1], epochs=8, checkpoint="sizes", quiet=True
)
for result in results:
    share, error = result.shares["weight_share"], result.validation_error
    print(f"target {result.target:.0%}, seed {result.run.seed}: {share:.1%} of the weights, error {error:.2%}")
written, _ = report.write("sizes", figures=False)
print(f"open {written[-1]} in a browser")
