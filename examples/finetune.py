"""Cut a trained network to half its multiplications, in a few epochs of fine-tuning. CPU, a few seconds."""

import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.train import evaluate

torch.manual_seed(0)
data = espalier.data.load("digits").as_floats()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip

# The network somebody has trained already.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
for _ in range(250):
    index = torch.randint(len(data.train_inputs), (64,))
    optimizer.zero_grad()
    F.cross_entropy(model(data.train_inputs[index]), data.train_labels[index]).backward()
    optimizer.step()
before = evaluate(model, data.test, loss=F.cross_entropy)

result = espalier.fit(
    model, data.train, loss=F.cross_entropy, epochs=6, cost="macs", target=0.5, recipe="finetune", validation=data.test
)
after = evaluate(result.model, data.test, loss=F.cross_entropy)
print(f"error {before.error:.2%} -> {after.error:.2%}  MACs 100% -> {result.shares['cost_share']:.1%}")
