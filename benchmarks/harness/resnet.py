"""ResNet-50 and ResNet-18 (He et al. 2015, table 1) in plain torch: image classifiers with untrained weights.

stem      7 x 7 convolution, stride 2; 3 x 3 maximum, stride 2
stages    4 of residual blocks: y = relu(f(x) + shortcut(x)); the first of stages 2 to 4 halves height and width
head      mean over positions -> linear
"""

import torch
from torch import Tensor, nn

STAGES = {"resnet50": (3, 4, 6, 3), "resnet18": (2, 2, 2, 2)}
EXPANSION = {"resnet50": 4, "resnet18": 1}


class Convolution(nn.Sequential):
    """Convolution without bias and batch normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1):
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
        )


class Block(nn.Module):
    """A residual block; with an expansion of 4 the 3 x 3 convolution is between two of 1 x 1 (a bottleneck)."""

    def __init__(self, inputs: int, width: int, stride: int, expansion: int):
        super().__init__()
        outputs = width * expansion
        kernels = ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1))
        if expansion == 1:
            kernels = ((inputs, width, 3, stride), (width, outputs, 3, 1))
        self.convolutions = nn.ModuleList(Convolution(*each) for each in kernels)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else Convolution(inputs, outputs, 1, stride)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = x_BCHW
        for i, convolution in enumerate(self.convolutions):
            y_BCHW = convolution(y_BCHW if i == 0 else y_BCHW.relu())
        return (y_BCHW + self.shortcut(x_BCHW)).relu()


class ResNet(nn.Module):
    """Logits of ``classes`` for images x_BCHW of any size from 32 x 32."""

    def __init__(self, name: str, classes: int = 1000):
        super().__init__()
        expansion, channels = EXPANSION[name], 64
        self.stem = Convolution(3, channels, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        blocks = []
        for stage, count in enumerate(STAGES[name]):
            for i in range(count):
                width = 64 << stage
                blocks.append(Block(channels, width, 2 if stage and i == 0 else 1, expansion))
                channels = width * expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.blocks(self.pool(self.stem(x_BCHW).relu()))
        return self.head(x_BCHW.mean((2, 3)))


def classifier(name: str, dtype: torch.dtype = torch.float32) -> ResNet:
    """An untrained network for inference, with the same weights in every process."""
    torch.manual_seed(0)
    return ResNet(name).eval().requires_grad_(False).to(dtype)
