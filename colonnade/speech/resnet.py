"""Residual front ends: 512 features of a frame's samples, and of its pictures.

    sound     Conv1d 1 → 64 (80 samples, stride 4)       ResNet-18 in one dimension, mean over 20 positions   3.85 M
    pictures  Conv3d 1 → 64 (5 × 7 × 7, stride 1 2 2)    max-pool, ResNet-18, mean over positions            11.18 M

They are those of Auto-AVSR (Ma et al., arXiv 2303.14307), applied to each frame separately: the first audio convolution
reads the 76 samples before the frame, the first picture convolution is causal in time, and the residual blocks are
zero-padded at the frame's borders. So a stream computes the same as a whole recording, and keeps only those samples and
pictures.
"""

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)
OUTPUT_WIDTH = WIDTHS[-1]
"""Numbers of a frame."""
KERNEL, STRIDE = 80, 4
HISTORY_SAMPLES = KERNEL - STRIDE
"""Number of samples before a frame that its first convolution reads."""


class Residual(nn.Module):
    """x + two convolutions of width 3 with batch norm; the stride is the first one's (He et al., arXiv 1512.03385)."""

    def __init__(self, dims: int, inputs: int, outputs: int, stride: int):
        super().__init__()
        conv, norm = _layers(dims)
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.act = nn.SiLU()
        self.skip = None
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(conv(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The same number of dimensions, with the size of each divided by the stride."""
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return self.act(y + (x if self.skip is None else self.skip(x)))


def _layers(dims: int) -> tuple[type[nn.Conv1d] | type[nn.Conv2d], type[nn.BatchNorm1d] | type[nn.BatchNorm2d]]:
    return (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d)


def trunk(dims: int) -> nn.Sequential:
    """The eight residual blocks of a ResNet-18."""
    blocks: list[nn.Module] = []
    inputs = WIDTHS[0]
    for i, outputs in enumerate(WIDTHS):
        blocks += [Residual(dims, inputs, outputs, 1 if i == 0 else 2), Residual(dims, outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*blocks)


class SoundResNet(nn.Module):
    """Maps (T, HISTORY_SAMPLES + 640) samples, each frame with those before it, to (T, 512)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(1, WIDTHS[0], KERNEL, STRIDE, bias=False), nn.BatchNorm1d(WIDTHS[0]), nn.SiLU()
        )
        self.trunk = trunk(1)

    def forward(self, samples_TA: Tensor) -> Tensor:
        """The mean over the positions of each frame."""
        return self.trunk(self.stem(samples_TA[:, None])).mean(2)


class PictureResNet(nn.Module):
    """Maps (T, history + 1, h, w) pictures, each frame's after its predecessors, to (T, 512)."""

    def __init__(self, history: int):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(history + 1, WIDTHS[0], 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.SiLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.trunk = trunk(2)

    def forward(self, pictures: Tensor) -> Tensor:
        """The mean over the positions of each picture."""
        return self.trunk(self.stem(pictures)).mean((2, 3))
