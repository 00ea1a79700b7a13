"""The cache-aware Conformer: streams equal whole recordings, tensor parallelism, training, and transformers' model."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from torch.nn import functional as F

from colonnade.config import Plan
from colonnade.config.speech import SPEECH_PRESETS, SpeechConfig
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.model.conformer import ConformerEncoder
from colonnade.model.segments import Segments
from colonnade.parallel.axis import Axes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import WHOLE, layout_of, local_part, placements
from colonnade.speech.features import FrameStream
from colonnade.speech.listen import StreamingRecogniser, listen
from colonnade.speech.model import SpeechModel
from colonnade.speech.streams import StreamPool
from colonnade.speech.subsampling import SubsampledFeatures, stage_rows
from tests.unit.test_segments import frames, stream_all
from tests.worlds import assert_same, run

TINY = SpeechConfig(
    family="conformer", front_end="subsampling", subsampling_channels=6, layers=2, width=12, heads=3, ffn_width=20,
    joint_width=12, mels=10, segment=4, segments=(1, 3), left=7, right=0, conv_kernel=5, scale_input=True,
)  # fmt: skip
LENGTHS = [13, 1, 0, 8, 23]
SIZES = [Segments(4, 4, 0), Segments(1, 7, 0), Segments(3, 6, 0), Segments(30, 0, 0)]


def encoder(axes: Axes | None = None, kernel: int = 5) -> ConformerEncoder:
    config = TINY.encoder.replace(init_std=0.3)
    model = ConformerEncoder(config, kernel, True, *([axes] if axes else []), dtype=torch.float64).initialise(0)
    whole, layout = ConformerEncoder(config, kernel, dtype=torch.float64), layout_of(model)
    with torch.no_grad():  # biases and norms away from 0 and 1
        for (name, x), (_, shape) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            if x.ndim == 1 or name.endswith("bias"):
                noise = frames(*shape.shape, seed=sum(map(ord, name)))
                x.add_(0.3 * local_part(noise, layout[name], model.axes))
    return model


def plain(model: ConformerEncoder, x: torch.Tensor, sizes: Segments) -> torch.Tensor:
    """Frame by frame, from the equations of the module's docstring."""
    S, L, H, N = sizes.segment, sizes.left, model.config.head_width, model.config.heads
    rates = 1.0 / 10000.0 ** (torch.arange(0, x.shape[1], 2).float() / x.shape[1])  # float32, as the module

    def position(d: int) -> torch.Tensor:
        return torch.stack(((d * rates).sin(), (d * rates).cos()), 1).flatten().double()

    def ffn(layer, rows):
        return F.linear(F.silu(F.linear(rows, layer.up.weight, layer.up.bias)), layer.down.weight, layer.down.bias)

    for block in model.blocks:
        attention, conv = block.attention, block.conv
        x = x + 0.5 * ffn(block.ffn1, block.norm1(x))
        q, k, v = F.linear(block.norm2(x), attention.qkv.weight, attention.qkv.bias).view(len(x), N, 3, H).unbind(2)
        rows = []
        for t in range(len(x)):
            start = t // S * S
            keys = range(max(0, start - L), min(len(x), start + S))
            r = torch.stack([(attention.relative.weight @ position(t - j)).view(N, H) for j in keys])
            scores = (q[t] + attention.key_bias) * k[keys.start : keys.stop] + (q[t] + attention.position_bias) * r
            weights = (scores.sum(2) / math.sqrt(H)).softmax(0)
            rows.append((weights[:, :, None] * v[keys.start : keys.stop]).sum(0).flatten())
        x = x + F.linear(torch.stack(rows), attention.out.weight, attention.out.bias)
        gated = F.glu(F.linear(block.norm3(x), conv.expand.weight, conv.expand.bias), 1)
        K = conv.kernel
        padded = torch.cat((gated.new_zeros(K - 1, gated.shape[1]), gated))
        y = torch.stack([(padded[t : t + K] * conv.depthwise.T).sum(0) for t in range(len(x))]) + conv.depthwise_bias
        x = x + F.linear(F.silu(conv.norm(y)), conv.project.weight, conv.project.bias)
        x = block.norm5(x + 0.5 * ffn(block.ffn2, block.norm4(x)))
    return x


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_whole_sequences_equal_a_plain_reference(sizes):
    model, x = encoder(), frames(sum(LENGTHS), 12).requires_grad_()
    y = model(x, sizes.batch(LENGTHS))
    reference = torch.cat([plain(model, piece, sizes) for piece in x.split(LENGTHS) if len(piece)])
    weights, parameters = frames(*y.shape, seed=2), [x, *model.parameters()]
    grads, theirs = (torch.autograd.grad((z * weights).sum(), parameters) for z in (y, reference))
    assert_same(y, reference)
    for ours, other in zip(grads, theirs, strict=True):
        assert_same(ours, other)


@pytest.mark.parametrize("kernel", [1, 5])
@pytest.mark.parametrize("cuts", [[1], [3, 7, 100]], ids=str)
def test_streams_equal_whole_sequences(cuts, kernel):
    """Streams of different sizes share steps, and slots that held others."""
    model = encoder(kernel=kernel).requires_grad_(False)
    pool = StreamPool(model, Segments(30, 7, 0), 5)
    for shift in range(4):
        sizes = [SIZES[(i + shift) % 4] for i in range(5)]
        inputs = list(frames(sum(LENGTHS), 12, seed=shift).split(LENGTHS))
        for own, x, y in zip(sizes, inputs, stream_all(pool, inputs, cuts, sizes), strict=True):
            assert_same(y, model(x, own.batch([len(x)])))
    with pytest.raises(DataError, match="31 frames, 0 before"):
        pool.open(Segments(31, 0, 0))
    with pytest.raises(DataError, match="8 before"):
        pool.open(Segments(1, 8, 0))
    with pytest.raises(ConfigError, match="right 1"):
        StreamPool(model, Segments(4, 4, 1), 1)


def test_an_hour_takes_the_memory_of_a_second_and_a_failed_step_may_be_repeated():
    model, sizes = encoder().requires_grad_(False), Segments(4, 4, 0)
    pool, x = StreamPool(model, sizes, 1), frames(400, 12)
    stream, before = pool.open(), pool.cache.cache_bytes
    found = []
    for i, part in enumerate(x.split(4)):
        pool.push(stream, part)
        if i == 50:
            handle = model.blocks[1].conv.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
            with pytest.raises(RuntimeError, match="lost"):
                pool.step()
            handle.remove()
        found.append(pool.step()[stream])
    assert_same(torch.cat(found), model(x, sizes.batch([400])))
    assert pool.cache.cache_bytes == before == 8 * 2 * (2 * 8 * 12 + (4 + 4) * 12)


def _tensor_parallel(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        sizes, x = Segments(3, 6, 0), frames(19, 12).requires_grad_()
        model, whole = encoder(context.axes), encoder()
        reference = whole(x, sizes.batch([19]))
        reference.square().sum().backward()
        expected, x.grad = x.grad, None
        y = model(x, sizes.batch([19]))
        y.square().sum().backward()
        assert_same(y, reference)
        assert_same(x.grad, expected)
        layout, grads = layout_of(model), {name: p.grad for name, p in whole.named_parameters()}
        for name, p in model.named_parameters():
            assert_same(p.grad, local_part(grads[name], layout[name], context.axes))
        (streamed,) = stream_all(StreamPool(model.requires_grad_(False), sizes, 2), [x.detach()], [5])
        assert_same(streamed, reference)


def test_tensor_parallel_whole_and_streamed():
    run(3, _tensor_parallel, 3)


def sound(seconds: float, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.1, int(seconds * 16000)))


def talkative(config: SpeechConfig = TINY, seed: int = 0) -> SpeechModel:
    """A random model in float64 that emits labels now and then."""
    model = SpeechModel(config, seed, torch.float64).requires_grad_(False).eval()
    model.joint.bias[0] += 2.0
    model.joint.weight *= 6
    return model


@pytest.mark.parametrize("factor", [4, 8])
@pytest.mark.parametrize("samples", [1, 159, 160, 199, 200, 1279, 1480, 1481, 9999])
def test_features_of_streams_equal_those_of_the_whole(factor, samples):
    own, x = SubsampledFeatures(TINY.replace(subsampling=factor), torch.float64), sound(1)[:samples]
    assert stage_rows(factor) == {4: [7, 3], 8: [15, 7, 3]}[factor]
    frames_T = own.frames(samples)
    padded = torch.cat((x.new_zeros(own.start), x, x.new_zeros(20000)))
    whole = own(padded[: own.before + frames_T * own.frame], 0, samples)
    assert len(whole) == frames_T == 1 + -(-(max(1, samples // 160) - 1) // factor)
    for cut in (1, 37, 640, 5000):
        stream = FrameStream(own)
        parts = [stream.push(piece) for piece in x.split(cut)]
        assert_same(torch.cat((*parts, stream.end())), whole)
    assert len(FrameStream(own).end()) == 0


@pytest.mark.parametrize("family", ["conformer", "emformer"])
@pytest.mark.parametrize("factor", [4, 8])
def test_streams_give_the_text_of_whole_recordings(family, factor):
    config = TINY.replace(subsampling=factor, family=family)
    model = talkative(config)
    inputs = [sound(3.7, 1), sound(0.4, 2), sound(4.3, 3), sound(0.02, 4)]
    chosen = [model.choose_segments(S) for S in (1, 3, 4, 4)]
    assert {own.left for own in chosen} == ({7, 6, 4} if family == "conformer" else {7})
    expected = [model.recognise(x, sizes=own) for x, own in zip(inputs, chosen, strict=True)]
    assert sum(map(len, expected)) > 10, "nothing was said, so nothing is compared"
    listeners = StreamingRecogniser(model, 4)
    streams = [listeners.open(own.segment) for own in chosen]
    texts = dict.fromkeys(streams, "")
    for i, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
        for piece in x.split(1500 + 700 * i):
            listeners.push(stream, piece)
            for own, text in listeners.step().items():
                texts[own] += text
        listeners.end(stream)
    while found := listeners.step():
        for own, text in found.items():
            texts[own] += text
    assert [texts[stream] for stream in streams] == expected


def test_it_is_saved_loaded_and_trained(tmp_path):
    model = SpeechModel(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    sound_TA, labels = model.features(sound(1.0, 3).float()), [[1, 2, 3]]
    losses = []
    for _ in range(60):
        loss = model.loss(model.frames(sound_TA), [len(sound_TA)], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    model.eval().save(tmp_path / "step-1")
    other = SpeechModel.load(tmp_path / "step-1")
    assert other.config == TINY
    text = "".join(listen(other, sound(1.0, 3).float().split(700)))
    assert text == model.recognise(sound(1.0, 3).float())
    assert other.align(sound(1.0, 3).float(), "ab")[0].word == "ab"


def test_refusals():
    for change, problem in (
        ({"right": 1}, "right is 1"), ({"memory": 2}, "memory 2"), ({"lookaheads": (1,)}, r"lookaheads \[1\]"),
        ({"picture": 24}, "does not support pictures"), ({"width": 9}, "9 is odd"),
        ({"pieces": ("a", "a")}, "pieces has 'a' twice"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            TINY.replace(**change)
    assert SPEECH_PRESETS["conformer-tiny"].family == "conformer"


PIECES = ("<unk>", "▁t", "▁th", "▁a", "t", "h", "e", "m", "▁", "a", "b", "c", "o")


def test_pieces():
    config = TINY.replace(pieces=PIECES, letter_head=False)
    assert [PIECES[label - 1] for label in config.labels("them beam")] == ["▁th", "e", "m", "▁", "b", "e", "a", "m"]
    assert config.text(config.labels("them beam")) == " them beam"
    assert config.text([1, 2]) == " t"
    assert config.vocab_size == len(PIECES) + 1
    with pytest.raises(DataError, match="'z'"):
        config.labels("z")
    with pytest.raises(ConfigError, match="pieces of words"):
        SpeechModel(config).align(sound(1), "them")
    with pytest.raises(ConfigError, match="no letter head"):
        SpeechModel(TINY.replace(letter_head=False)).align(sound(1), "them")
    model = talkative(config)
    text = model.recognise(sound(2.0, 5))
    assert len(text) > 5
    assert not text.startswith(" ")
    assert "".join(listen(model, sound(2.0, 5).split(900))) == text


def their_model(folder: Path, **changes):
    """A random model of transformers, saved, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "NemotronAsrStreamingForRNNT"):
        pytest.skip("this version of transformers has no nemotron_asr_streaming")
    sizes = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
        "conv_kernel_size": 5, "subsampling_conv_channels": 8, "num_mel_bins": 20, "sliding_window": 8,
        "default_num_lookahead_tokens": 2, "initializer_range": 0.2,
    } | changes  # fmt: skip
    torch.manual_seed(0)
    config = transformers.NemotronAsrStreamingConfig(
        vocab_size=len(PIECES) + 1, blank_token_id=len(PIECES), decoder_hidden_size=16, num_decoder_layers=2,
        encoder_config=transformers.NemotronAsrStreamingEncoderConfig(**sizes),
    )  # fmt: skip
    model = transformers.NemotronAsrStreamingForRNNT(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if x.ndim == 1 or "bias_" in name:
                x.add_(0.2 * torch.randn_like(x))
        model.joint.head.weight.mul_(3.0)
        for name, x in model.decoder.named_parameters():
            x.mul_(6.0 if "bias" not in name else 0.0)
    model.save_pretrained(folder)
    vocabulary = {piece: i for i, piece in enumerate((*PIECES, "<blank>"))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    core.save(str(folder / "tokenizer.json"))
    return transformers, model


@pytest.mark.parametrize("changes", [{}, {"attention_bias": False, "convolution_bias": False, "scale_input": False}])
def test_equals_transformers(changes, tmp_path):
    """Encoder, logits, loss-relevant states and greedy text, float32 there; whole and by segments of each length."""
    transformers, theirs = their_model(tmp_path, **changes)
    ours = SpeechModel.load(tmp_path, dtype=torch.float64).requires_grad_(False)
    theirs = theirs.double()
    assert ours.config.segment == 3
    assert [own.segment for own in ours.all_sizes] == [1, 2, 3, 7, 14]
    assert [own.left for own in ours.all_sizes] == [7, 6, 6, 7, 0]
    samples = sound(1.7, 7)
    features = transformers.NemotronAsrStreamingFeatureExtractor(feature_size=20)
    given = features(samples.float().numpy(), sampling_rate=16000, return_tensors="pt")
    own = ours.features(samples)
    spectra = given["input_features"].double()
    seen = own[:, 14 * 20 : 15 * 20]  # the last spectrum of each frame
    for t in range(len(own) - 1):
        torch.testing.assert_close(seen[t], spectra[0, 8 * t], atol=2e-3, rtol=1e-4)
    # The spectra are float32 there, so the encoders are compared on ours.
    mels = torch.zeros_like(spectra)
    for t, frame in enumerate(own):
        rows = frame[: 15 * 20].view(15, 20)
        for i in range(15):
            if 0 <= (m := 8 * t - 14 + i) < mels.shape[1]:
                mels[0, m] = rows[i]
    emitted: set[int] = set()
    for sizes in ours.all_sizes:
        lookahead = sizes.segment - 1
        expected = theirs.encoder(
            mels, attention_mask=given["attention_mask"], num_lookahead_tokens=lookahead
        ).last_hidden_state[0]
        y_TD = ours.encode(ours.frames(own), [len(own)], sizes)
        assert len(y_TD) == len(expected)
        torch.testing.assert_close(y_TD, expected, atol=1e-6, rtol=1e-6)
        labels = [3, 1, 5, 8]
        logits = theirs(
            input_features=mels, attention_mask=given["attention_mask"], num_lookahead_tokens=lookahead,
            decoder_input_ids=torch.tensor([[len(PIECES), *labels]]),
        ).logits[0]  # fmt: skip
        p_UD = ours.predictor([[label + 1 for label in labels]])
        e_TD = ours.out(y_TD)
        for t in (0, len(y_TD) - 1):
            logprobs = ours.joint.logprobs(e_TD[t].expand(5, -1), p_UD)
            torch.testing.assert_close(logprobs, logits[t].log_softmax(-1).roll(1, -1), atol=1e-6, rtol=1e-6)
        ids = theirs.generate(
            input_features=mels, attention_mask=given["attention_mask"], num_lookahead_tokens=lookahead,
            decoder_start_token_id=len(PIECES), max_new_tokens=20 * len(y_TD),
        )  # fmt: skip
        found = ours.search(1).deltas([e_TD])[0]
        expected_ids = [i for i in getattr(ids, "sequences", ids)[0].tolist() if i != len(PIECES)]
        assert [label - 1 for label in found] == expected_ids
        emitted |= set(found)
        text = ours.recognise(samples, sizes=sizes)
        assert "".join(listen(ours, samples.split(1111), segment=sizes.segment)) == text
    assert emitted, "nothing was said, so no texts were compared"
    loaded = SpeechModel.load(tmp_path)
    loaded.save(tmp_path / "native")
    again = SpeechModel.load(tmp_path / "native")
    assert again.config == loaded.config
    assert again.recognise(samples.float()) == loaded.recognise(samples.float())


def _files_over_tp(world: int, folder: str) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        model = SpeechModel.load(Path(folder), context.axes, torch.float64)
        whole = SpeechModel.load(Path(folder), dtype=torch.float64)
        samples = sound(2.0, 7)
        x, labels = whole.frames(whole.features(samples)).detach(), [[2, 3, 4]]
        for own in (model, whole):
            own.loss(x, [len(x)], labels).backward()
        layout, theirs = placements(model), dict(whole.named_parameters())
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert_same(p.grad, local_part(theirs[name].grad, layout.get(name, WHOLE), context.axes))
        assert "".join(listen(model.requires_grad_(False), samples.split(999))) == whole.recognise(samples)


def test_files_of_transformers_over_tp(tmp_path):
    their_model(tmp_path)
    run(2, _files_over_tp, 2, str(tmp_path))


def test_files_that_are_refused(tmp_path):
    their_model(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for change, problem in (
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"), ({"blank_token_id": 0}, "blank_token_id is 0"),
        ({"num_decoder_layers": 3}, "lack 'decoder.lstm.weight_ih_l2'"),
        ({"num_decoder_layers": 1}, "unknown tensor 'decoder.lstm.bias_hh_l1'"),
        ({"decoder_hidden_size": 18}, "do not match the config"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(CheckpointError, match=problem):
            SpeechModel.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        SpeechModel.load(tmp_path)
