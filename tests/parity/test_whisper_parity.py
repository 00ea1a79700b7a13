"""Whisper against transformers in float64: spectrogram, logits, gradients, files in both directions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf
from colonnade.errors import CheckpointError
from colonnade.model import Rows, Source
from colonnade.speech.log_mel import log_mel
from colonnade.speech.token_times import token_starts
from colonnade.speech.transcribe import Window
from tests.encdec import inputs, texts
from tests.hf import load
from tests.hf_reference import same_loss_and_gradients
from tests.worlds import assert_same

FRAMES, MELS = 14, 9
SETTINGS: dict[str, Any] = {
    "vocab_size": 61, "num_mel_bins": MELS, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 30, "decoder_ffn_dim": 35, "d_model": 24, "pad_token_id": 0,
    "max_source_positions": FRAMES, "max_target_positions": 32, "decoder_start_token_id": 1, "eos_token_id": 2,
    "bos_token_id": 2, "suppress_tokens": [], "begin_suppress_tokens": [],
}  # fmt: skip


def theirs() -> Any:
    torch.manual_seed(4)
    config = transformers.WhisperConfig(**SETTINGS, attn_implementation="eager")
    model = transformers.WhisperForConditionalGeneration(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model.eval()


def test_logits_gradients_and_files(tmp_path: Path) -> None:
    model = theirs()
    model.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    mel_BMS = torch.randn(2, MELS, 2 * FRAMES, dtype=torch.float64)
    targets, labels = texts([5, 9], 61), texts([5, 9], 61, seed=3)
    stream, attend = inputs([torch.arange(FRAMES)] * 2, targets)
    assert stream.source is not None
    stream = stream._replace(source=Source(mel_BMS, stream.source.positions_S))
    model.get_encoder().embed_positions.requires_grad_(True)  # frozen in transformers, a parameter here
    expected = torch.cat(
        [model(input_features=mel_BMS[[i]], decoder_input_ids=t[None]).logits[0] for i, t in enumerate(targets)]
    )
    assert_same(ours(stream, attend, Rows()), expected.detach(), 1e-6, "logits")
    same_loss_and_gradients(ours, model, (stream, attend), expected, torch.cat(labels))

    write_hf(load(tmp_path / "theirs"), tmp_path / "ours")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert HFFolder(tmp_path / "ours").config == HFFolder(tmp_path / "theirs").config


def test_attention_weights_and_starts_of_tokens(tmp_path: Path) -> None:
    """The weights that words are aligned by are those of transformers; so are the starts of tokens."""
    from transformers.models.whisper import generation_whisper

    model = theirs()
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)

    class Loaded:
        transformer, config, source = ours, ours.config, "it"

        @property
        def tokenizer(self) -> Any:
            raise AssertionError("no text here")

    mel_MS, ids = torch.randn(MELS, 2 * FRAMES, dtype=torch.float64), [1, 5, 9, 30, 7, 2]
    heads, frames = {0: [3], 1: [0, 2]}, 11
    found, logits = Window(Loaded(), mel_MS).align(ids, heads, frames)
    with torch.no_grad():
        outputs = model(input_features=mel_MS[None], decoder_input_ids=torch.tensor([ids]), output_attentions=True)
    assert_same(logits, outputs.logits[0].float(), 1e-5, "logits")
    whole = torch.stack([outputs.cross_attentions[i][0, n] for i in heads for n in heads[i]])[..., :frames]
    # Ours see the sound's frames only: the softmax is over these.
    assert_same(found, (whole / whole.sum(-1, keepdim=True)).float(), 1e-5, "weights")
    normal = (found - found.mean(1, keepdim=True)) / found.std(1, keepdim=True, unbiased=False)
    matrix = generation_whisper._median_filter(normal[None], 7)[0].mean(0)
    rows, columns = generation_whisper._dynamic_time_warping(-matrix.double().numpy())
    assert token_starts(found) == columns[np.concatenate([[True], np.diff(rows) > 0])].tolist()


@pytest.mark.parametrize("bands", [80, 128])
def test_spectrogram(bands: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    sound = np.random.default_rng(0).standard_normal(480_000).astype(np.float32) * np.linspace(0, 1, 480_000)
    expected = torch.from_numpy(extractor(sound, sampling_rate=16_000).input_features[0])
    found = log_mel(torch.from_numpy(sound.astype(np.float64)), bands)
    assert (found - expected).abs().max() < 2e-4  # float32 there


def test_unequal_heads_are_refused(tmp_path: Path) -> None:
    transformers.WhisperConfig(**SETTINGS | {"encoder_attention_heads": 2}).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'encoder_attention_heads' to 2: 'decoder_attention_heads' \(4\)"):
        HFFolder(tmp_path)
