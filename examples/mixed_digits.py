"""MixUp and CutMix against wrong labels: scikit-learn's handwritten digits, 40% of the training labels random.

python examples/mixed_digits.py
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from colonnade.data.loader import Cursor
from colonnade.data.mixing import Mixer, mixed_cross_entropy

TRAIN, BATCH = 1000, 50


def digits() -> tuple[Tensor, Tensor, Tensor]:
    """(images (1797, 8, 8) from 0 to 1, their digits, the labels to train on), shuffled."""
    data: Any = load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data.images), generator=generator)
    images, labels = torch.tensor(data.images, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    random = torch.randint(10, (len(labels),), generator=generator)
    wrong = torch.rand(len(labels), generator=generator) < 0.4
    return images, labels, torch.where(wrong, random, labels)


def accuracy(kind: str, steps: int, seed: int = 0) -> float:
    """Of a network of two layers on the images that it was not trained on."""
    images, labels, noisy = digits()
    cursor = Cursor(TRAIN, seed)
    mixer = None if kind == "plain" else Mixer(TRAIN, kind, seed=seed)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        index = cursor.indices(step, BATCH)
        batch, own = images[index], noisy[index]
        partners, share = own, torch.ones(BATCH)
        if mixer is not None:
            numbers = range(step * BATCH, (step + 1) * BATCH)
            batch, others, share = mixer.mix(batch, numbers, lambda which: images[which])
            partners = noisy[others]
        optimizer.zero_grad()
        mixed_cross_entropy(model(batch), own, partners, share).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(images[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean())


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for kind in ("plain", "mixup", "cutmix"):
        scores = [accuracy(kind, steps, seed) for seed in range(3)]
        print(f"{kind:6} {sum(scores) / 3:.3f} of the unseen digits ({', '.join(f'{s:.3f}' for s in scores)})")
