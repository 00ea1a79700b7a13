"""MixUp and CutMix: functions of (seed, sample number), λ corrected to the box, and labels."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from colonnade.data.mixing import Mix, Mixer, mixed_cross_entropy
from colonnade.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
IMAGES = torch.rand(9, 3, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def read(which: list[int]) -> torch.Tensor:
    return IMAGES[which]


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "both"])
def test_a_sample_does_not_depend_on_its_batch(kind: str) -> None:
    mixer = Mixer(9, kind, seed=4)  # type: ignore[arg-type]
    numbers = [0, 1, 2, 3, 20, 21]
    index = [number % 9 for number in numbers]
    whole, partners, share = mixer.mix(IMAGES[index], numbers, read)
    for order in ([5, 3, 1], [0, 2, 4]):
        part = mixer.mix(IMAGES[[index[i] for i in order]], [numbers[i] for i in order], read)
        assert torch.equal(part[0], whole[order])
        assert part[1] == [partners[i] for i in order]
        assert torch.equal(part[2], share[order])
    assert [mixer.draw(n, 8, 6) for n in numbers] != [Mixer(9, kind, seed=5).draw(n, 8, 6) for n in numbers]  # type: ignore[arg-type]


def test_images_are_mixed_as_drawn() -> None:
    mixer = Mixer(9, "both", seed=4)
    mixed, partners, share = mixer.mix(IMAGES, range(9), read)
    kinds = set()
    for i, (partner, lam, box) in enumerate(mixer.draw(n, 8, 6) for n in range(9)):
        assert (partners[i], share[i].item()) == (partner, lam)
        kinds.add(box is None)
        own = torch.ones(8, 6, dtype=torch.float64)
        if box is None:
            own *= lam
        else:
            own[box[0] : box[2], box[1] : box[3]] = 0
            assert own.mean().item() == pytest.approx(lam)
        expected = own * IMAGES[i] + (1 - own) * IMAGES[partner]
        assert torch.allclose(mixed[i], expected, atol=1e-15, rtol=0)
    assert kinds == {True, False}


def test_distributions() -> None:
    """λ of MixUp is Beta(α, α); boxes are centred anywhere; partners are uniform."""
    mixes = [Mixer(50, "mixup", alpha=0.4, seed=1).draw(n, 8, 8) for n in range(4000)]
    share = np.array([each.share for each in mixes])
    assert share.mean() == pytest.approx(0.5, abs=0.03)
    assert share.var() == pytest.approx(0.25 / 1.8, rel=0.05)
    counts = np.bincount([each.partner for each in mixes], minlength=50)
    assert counts.min() > 40
    assert counts.max() < 125
    boxes = [Mixer(50, "cutmix", seed=1).draw(n, 32, 32) for n in range(2000)]
    covered = np.zeros((32, 32))
    for each in boxes:
        assert isinstance(each, Mix)
        assert each.box is not None
        covered[each.box[0] : each.box[2], each.box[1] : each.box[3]] += 1
    assert covered.min() > 0.1 * len(boxes)
    kinds = [Mixer(50, "both").draw(n, 8, 8).box is None for n in range(1000)]
    assert 400 < sum(kinds) < 600


def test_loss_and_refusals() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    a, b, lam = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 4, 2, 0]), torch.tensor([1.0, 0.25, 0.5, 0.0])
    target = lam[:, None] * F.one_hot(a, 5) + (1 - lam[:, None]) * F.one_hot(b, 5)
    expected = F.cross_entropy(logits, target.double())
    assert mixed_cross_entropy(logits, a, b, lam.double()).item() == pytest.approx(expected.item(), rel=1e-12)
    with pytest.raises(ConfigError, match="an alpha above 0"):
        Mixer(3, alpha=0)


@pytest.mark.slow
def test_mixup_withstands_wrong_labels() -> None:
    """The example: 40% of the training labels are random."""
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("mixed_digits", ROOT / "examples" / "mixed_digits.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.accuracy("mixup", 600) > example.accuracy("plain", 600) + 0.03
