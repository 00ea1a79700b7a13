"""A teacher's cache: its identity, and records that another process adds."""

from pathlib import Path

import pytest
import torch

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError
from colonnade.model import Packed, Stream
from colonnade.model.distill_loss import DistillLoss
from colonnade.model.distill_top import TopTokens
from colonnade.parallel.axis import SOLO
from colonnade.train.distill import Distiller
from colonnade.train.teacher_cache import TeacherCache, fingerprint
from tests.models import build


def test_teachers_that_differ_late_have_other_fingerprints(tmp_path: Path) -> None:
    for name, end in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1 << 20) + end)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_a_description_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text("[1, 2]\n", "utf-8")
    with pytest.raises(
        ConfigError, match=r"not a usable cache .* \(cache.json holds a JSON value that is not an object"
    ):
        TeacherCache(tmp_path, {}, 2, 3)


def test_records_of_another_process_are_found(tmp_path: Path) -> None:
    ours, theirs = (TeacherCache(tmp_path, {}, 2, 3) for _ in range(2))
    for number in range(2):
        top = TopTokens(torch.full((2, 3), number, dtype=torch.int32), torch.full((2, 3), -0.5 - number))
        key = ours.key(torch.tensor([number, 7]))
        ours.add(key, top)
        assert theirs.find(key) is None
        theirs.scan()
        found = theirs.find(key)
        assert found is not None
        assert torch.equal(found.ids_Tk, top.ids_Tk)
        assert torch.equal(found.logp_Tk, top.logp_Tk)
    assert len(theirs) == 2


@pytest.mark.parametrize("damaged", ["part-0.bin", "part-f.bin"])
def test_a_damaged_record_is_computed_again_once(damaged: str, tmp_path: Path) -> None:
    """Whichever of both files is read first."""
    top = TopTokens(torch.zeros((2, 3), dtype=torch.int32), torch.full((2, 3), -0.5))
    key = TeacherCache(tmp_path, {}, 2, 3).key(torch.tensor([1, 2]))
    TeacherCache(tmp_path, {}, 2, 3).add(key, top)
    (file,) = tmp_path.glob("part-*.bin")
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.unlink()
    (tmp_path / damaged).write_bytes(contents)
    again = TeacherCache(tmp_path, {}, 2, 3)
    assert again.find(key) is None
    again.add(key, top)
    again._own.rename(tmp_path / "part-8.bin")
    assert TeacherCache(tmp_path, {}, 2, 3).find(key) is not None


def test_a_rank_reads_what_another_has_computed(tmp_path: Path) -> None:
    """As the second tensor rank in a later epoch: the teacher is not asked again."""
    teacher = build(ModelConfig(vocab_size=40, layers=1, width=8, heads=2, ffn_width=16, context=8))
    ours, theirs = (TeacherCache(tmp_path, {}, 4, 5) for _ in range(2))
    stream, attend = Stream(torch.arange(8), torch.arange(4).repeat(2)), Packed.of([4, 4])
    targets_T = torch.arange(8)
    computed = Distiller(lambda: teacher, DistillLoss(), SOLO, ours).head(stream, attend, targets_T)

    def load() -> None:
        pytest.fail("the teacher was loaded")

    read = Distiller(load, DistillLoss(), SOLO, theirs).head(stream, attend, targets_T)  # type: ignore[arg-type]
    assert isinstance(computed.teacher, TopTokens)
    assert isinstance(read.teacher, TopTokens)
    assert torch.equal(read.teacher.ids_Tk, computed.teacher.ids_Tk)
