"""ResNet front ends: sizes, streams, frames by themselves, training, the preset av-small."""

import pytest
import torch

from colonnade.config.speech import SPEECH_PRESETS, SpeechConfig
from colonnade.speech.features import FRAME, Features, FrameStream
from colonnade.speech.front_end import FrontEnd
from colonnade.speech.listen import StreamingRecogniser
from colonnade.speech.model import SpeechModel
from colonnade.speech.resnet import HISTORY_SAMPLES, PictureResNet, SoundResNet
from tests.worlds import assert_same

SEEING = SpeechConfig(
    layers=1, width=16, heads=2, ffn_width=24, joint_width=12, segment=4, left=6, picture=24, front_end="resnet",
    fusion_width=32,
)  # fmt: skip


def parameters(module: torch.nn.Module) -> float:
    """Millions."""
    return sum(x.numel() for x in module.parameters()) / 1e6


def test_sizes_are_those_of_the_paper():
    assert parameters(SoundResNet()) == pytest.approx(3.85, abs=0.01)
    assert parameters(PictureResNet(4)) == pytest.approx(11.18, abs=0.01)
    front = FrontEnd(SPEECH_PRESETS["av-small"])
    assert front.fusion is not None
    assert [tuple(layer.weight.shape) for layer in front.fusion if isinstance(layer, torch.nn.Linear)] == [
        (3072, 1024), (512, 3072),
    ]  # fmt: skip
    assert parameters(SpeechModel(SPEECH_PRESETS["av-small"])) == pytest.approx(35.5, abs=2)
    one_block = SpeechModel(SPEECH_PRESETS["av-large"].replace(layers=1))
    assert parameters(one_block) + 27 * parameters(one_block.encoder) == pytest.approx(382.5, abs=2)


def test_twenty_places_a_frame():
    net = SoundResNet().eval()
    assert net.stem(torch.zeros(2, 1, HISTORY_SAMPLES + FRAME)).shape == (2, 64, 160)
    assert net.trunk(net.stem(torch.zeros(2, 1, HISTORY_SAMPLES + FRAME))).shape == (2, 512, 20)
    assert net(torch.zeros(3, HISTORY_SAMPLES + FRAME)).shape == (3, 512)
    for size in (24, 44, 88):
        assert PictureResNet(4).eval()(torch.zeros(2, 5, size, size)).shape == (2, 512)


def test_the_first_convolution_is_that_over_the_whole_recording():
    """Frames cut with the samples before them give what one left-padded convolution gives."""
    net, own = SoundResNet().double().eval(), Features(SEEING, torch.float64)
    samples = torch.randn(5 * FRAME, dtype=torch.float64)
    padded = torch.cat((samples.new_zeros(HISTORY_SAMPLES), samples))
    whole = net.stem[0](padded[None, None])[0]
    frames = net.stem[0](own(padded)[:, None])
    assert_same(torch.cat(list(frames), 1), whole)


@pytest.mark.slow
def test_streams_equal_whole_recordings():
    """Any cut of the sound; pictures that come with it; some frames without."""
    model = SpeechModel(SEEING, 0, torch.float64).requires_grad_(False).eval()
    model.joint.bias[0] += 1.0
    model.joint.weight *= 6
    samples, pictures = 0.1 * torch.randn(27 * FRAME - 5, dtype=torch.float64), torch.rand(20, 24, 24).double()
    for cut in (333, FRAME):
        stream = FrameStream(model.sound)
        found = torch.cat([*(stream.push(part) for part in samples.split(cut)), stream.end()])
        assert_same(found, model.features(samples))
    expected = model.recognise(samples, pictures)
    listeners, text = StreamingRecogniser(model), ""
    stream = listeners.open()
    listeners.push(stream, samples[:0], pictures)
    for part in samples.split(1500):
        listeners.push(stream, part)
        while found := listeners.step():
            text += found[stream]
    listeners.end(stream)
    while found := listeners.step():
        text += found[stream]
    assert text == expected != ""


def test_batch_norm_is_trained_and_saved(tmp_path):
    model = SpeechModel(SEEING)
    before = model.front_end.audio.stem[1].running_mean.clone()
    sound_TA, pictures = model.features(0.1 * torch.randn(6 * FRAME)), torch.rand(6, 24, 24)
    loss = model.train().loss(model.frames(sound_TA, pictures), [6], [[1, 2]])
    loss.backward()
    assert not torch.equal(model.front_end.audio.stem[1].running_mean, before)
    assert all(x.grad is not None for x in model.front_end.parameters())
    model.save(tmp_path / "step-1")
    loaded = SpeechModel.load(tmp_path / "step-1")
    with torch.inference_mode():
        assert torch.equal(loaded.frames(sound_TA, pictures), model.eval().frames(sound_TA, pictures))
