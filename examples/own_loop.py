"""A loop of your own, with autocast and clipped gradients, that shapes its network. CPU, seconds."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import espalier

EPOCHS = 15
torch.manual_seed(0)
data = espalier.data.load("digits").flatten().as_floats()
loader = DataLoader(TensorDataset(*data.train), 64, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
shaping = espalier.shape(model, data.train[0][:4], optimizer, target=0.3, updates=EPOCHS * len(loader))


def clip(*_: object) -> None:  # just before the weights move
    nn.utils.clip_grad_norm_(shaping.network.parameters(), 1.0)


optimizer.register_step_pre_hook(clip)


def closure(x: Tensor, y: Tensor) -> Tensor:  # called once for each structure that is drawn
    with torch.autocast("cpu", torch.bfloat16):  # on a GPU: "cuda"
        loss = F.cross_entropy(shaping.network(x), y)
    loss.backward()
    return loss


for epoch in range(EPOCHS):
    for x, y in loader:
        loss = shaping.step(closure, x, y)
    if epoch % 5 == 4:
        print(f"epoch {epoch + 1}: {shaping.phase}, loss {loss:.3f}")
result = shaping.finish(data.train, validation=data.test)
print(f"weights kept: {result.share_after:.1%}, error {result.validation.error:.2%}")
