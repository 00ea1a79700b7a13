"""CutMix on scikit-learn's handwritten digits: 200 training images, with and without mixing.

python examples/mixed_digits.py
"""

import sys

import torch
from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from torch import Tensor, nn

from colonnade.data.loader import Cursor
from colonnade.data.mixing import Mixer, mixed_cross_entropy

TRAIN, BATCH = 200, 50


def digits() -> tuple[Tensor, Tensor]:
    """(images (1797, 8, 8) from 0 to 1, their digits)."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)  # pyright: ignore


def accuracy(kind: str, steps: int, seed: int = 0) -> float:
    """Of a network of two layers on the images that it was not trained on."""
    images, labels = digits()
    cursor = Cursor(TRAIN, seed)
    mixer = Mixer(TRAIN, "cutmix", seed=seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        index = cursor.indices(step, BATCH)
        batch, own = images[index], labels[index]
        partners, share = own, torch.ones(BATCH)
        if kind == "cutmix":
            numbers = range(step * BATCH, (step + 1) * BATCH)
            batch, others, share = mixer.mix(batch, numbers, lambda which: images[which])
            partners = labels[others]
        optimizer.zero_grad()
        mixed_cross_entropy(model(batch), own, partners, share).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean())


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for kind in ("plain", "cutmix"):
        scores = [accuracy(kind, steps, seed) for seed in range(3)]
        print(f"{kind:7} {sum(scores) / 3:.4f} of the unseen digits ({', '.join(f'{s:.4f}' for s in scores)})")
