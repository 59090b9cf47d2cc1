"""A convolutional network at 30% of its multiplications, as an ONNX file. CPU, seconds; needs espalier[onnx]."""

import onnxruntime
import torch
from torch import nn

import espalier

torch.manual_seed(0)
data = espalier.data.load("digits")
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
)  # fmt: skip
result = espalier.fit(model, data, epochs=12, cost="macs", target=0.3, quiet=True)

images, labels = data.as_floats().test
shipped = espalier.ship(result, "cnn", formats=("torch", "onnx"))  # checked against torch
session = onnxruntime.InferenceSession("cnn/model.onnx")
(scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
error = (torch.from_numpy(scores).argmax(1) != labels).float().mean()
print(f"MACs kept: {result.shares['cost_share']:.1%}, error of model.onnx on {len(images)} test images: {error:.2%}")
