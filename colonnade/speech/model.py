"""A streaming recogniser of speech, and of pictures of the mouth: front ends, encoder, transducer, CTC.

    frames    :mod:`colonnade.speech.front_end`
    encoder   :mod:`colonnade.model.segment_encoder`
    loss      transducer + ½ CTC

The CTC head serves alignment, and without its loss the encoder learns nothing for hundreds of steps: the predictor
learns the grammar first.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.checkpoint.atomic_folder import (
    Manifest,
    commit,
    create_partial,
    partial_path,
    read_json,
    write_json,
    write_tensors,
)
from colonnade.config.speech import SpeechConfig
from colonnade.errors import CheckpointError, DataError
from colonnade.kernels import ctc
from colonnade.model.segment_encoder import SegmentEncoder
from colonnade.model.segments import Segments
from colonnade.model.transducer import Joint
from colonnade.speech.features import FRAME, FrameStream, mel_filters
from colonnade.speech.front_end import Frames, FrontEnd, stack_pictures
from colonnade.speech.predictor import LstmPredictor, StatelessPredictor
from colonnade.speech.search import GreedySearch

CTC_WEIGHT = 0.5


class SpeechModel(nn.Module):
    """Parameters are drawn from ``seed``."""

    def __init__(self, config: SpeechConfig, seed: int = 0, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.sizes = Segments(config.segment, config.left, config.right, config.memory)
        D, J, V = config.width, config.joint_width, config.vocab_size
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.front_end = FrontEnd(config)
            self.encoder = SegmentEncoder(config.encoder)
            self.out, self.ctc = nn.Linear(D, J), nn.Linear(D, V)
            lstm = config.predictor == "lstm"
            self.predictor = LstmPredictor(J, V, J, layers=1) if lstm else StatelessPredictor(J, V, J)
            self.joint = Joint(J, V)
            nn.init.normal_(self.joint.weight, std=J**-0.5)
        self.encoder.initialise(seed)
        self.to(dtype)
        self.filters = mel_filters(config.mels).to(dtype)

    def features(self, samples: Tensor) -> Tensor:
        """The spectra of a whole recording at 16 kHz, (T, 4·mels); a last part of a frame is filled up."""
        stream = FrameStream(self.filters, self.config.audio_history)
        return torch.cat((stream.push(samples), stream.end()))

    def frames(self, mel_TA: Tensor, pictures: Tensor | None = None) -> Tensor:
        """x_TD of a whole recording's spectra and its first pictures, (t, height, width)."""
        pictures = None if pictures is None or not len(pictures) else pictures[: len(mel_TA)]
        if pictures is None or not self.config.picture:
            return self.front_end(Frames(mel_TA, pictures_seen=pictures))
        history = self.config.picture_history
        padded = torch.cat((pictures.new_zeros(history, *pictures.shape[1:]), pictures))
        seen_T = torch.arange(len(mel_TA), device=mel_TA.device) < len(pictures)
        return self.front_end(Frames(mel_TA, None, stack_pictures(padded, history), seen_T))

    def encode(self, x_TD: Tensor, lengths: Sequence[int]) -> Tensor:
        """The encoded frames of whole recordings."""
        return self.encoder(x_TD, self.sizes.batch(lengths, x_TD.device))

    def loss(self, x_TD: Tensor, lengths: Sequence[int], labels: Sequence[Sequence[int]]) -> Tensor:
        """The loss of a label, mean over the batch."""
        y_TD = self.encode(x_TD, lengths)
        transducer = self.joint.loss(self.out(y_TD), self.predictor(labels), lengths, labels).sum()
        logprobs = nn.utils.rnn.pad_sequence(self.ctc(y_TD).log_softmax(1).split(list(lengths)))
        targets = torch.tensor([label for own in labels for label in own], device=y_TD.device)
        T_B, U_B = torch.tensor(list(lengths)), torch.tensor([len(own) for own in labels])
        side = F.ctc_loss(logprobs, targets, T_B, U_B, reduction="sum", zero_infinity=True)
        return (transducer + CTC_WEIGHT * side) / max(1, len(targets))

    @torch.inference_mode()
    def recognise(self, samples: Tensor, pictures: Tensor | None = None) -> str:
        """The text of a whole recording, by greedy search; equal to what streams give."""
        mel_TA = self.features(samples)
        if not len(mel_TA):
            return ""
        return self.texts(self.frames(mel_TA, pictures), [len(mel_TA)])[0]

    @torch.inference_mode()
    def texts(self, x_TD: Tensor, lengths: Sequence[int]) -> list[str]:
        """The texts of whole recordings, by greedy search over all at once."""
        search = GreedySearch(self.predictor, self.joint.logprobs, len(lengths))
        found = search.push(self.out(self.encode(x_TD, lengths)).split(list(lengths)))
        return [self.config.text([label for _, label in pairs]) for pairs in found]

    @torch.inference_mode()
    def align(
        self, samples: Tensor, text: str, pictures: Tensor | None = None
    ) -> list[tuple[str, float, float, float]]:
        """(word, start [s], end [s], score) of each word of a known text, by CTC."""
        mel_TA = self.features(samples)
        labels = self.config.labels(text)
        if not len(mel_TA):
            raise DataError("a recording of 0 samples has no words; give a longer one")
        y_TD = self.encode(self.frames(mel_TA, pictures), [len(mel_TA)])
        spans = ctc.align(self.ctc(y_TD).log_softmax(1), labels)
        words, place = [], 0
        for word in text.split(" "):
            own = spans[place : place + len(word)]
            if own:
                score = sum(span.score for span in own) / len(own)
                words.append((word, own[0].start * FRAME / 16000, own[-1].stop * FRAME / 16000, score))
            place += len(word) + 1
        return words

    def save(
        self, folder: Path, overwrite: bool = False, state: dict[str, Tensor] | None = None, step: int = 0
    ) -> None:
        """Write a checkpoint, whole or not at all; ``state`` is the optimizer's."""
        create_partial(folder, overwrite)
        partial = partial_path(folder)
        write_json(partial / "speech.json", {"config": self.config.model_dump(), "step": step})
        write_tensors(partial / "model.safetensors", {k: v.contiguous() for k, v in self.state_dict().items()})
        if state is not None:
            write_tensors(partial / "optimizer.safetensors", state)
        commit(folder, {})

    @staticmethod
    def load(folder: Path) -> "SpeechModel":
        """Read a checkpoint; raises CheckpointError for an incomplete or foreign one."""
        Manifest.read(folder).check_sizes(folder)
        if not (folder / "speech.json").is_file():
            raise CheckpointError(f"{folder} is not a speech recogniser; give a folder that speech train wrote")
        model = SpeechModel(SpeechConfig(**read_json(folder / "speech.json").get("config", {})))
        try:
            tensors = load_file(folder / "model.safetensors")
        except SafetensorError as why:
            raise CheckpointError(f"{folder}: the weights cannot be read: {why}; use another checkpoint") from None
        expected = {name: x.shape for name, x in model.state_dict().items()}
        if expected != {name: x.shape for name, x in tensors.items()}:
            raise CheckpointError(
                f"{folder}: the weights do not match speech.json; restore it or use another checkpoint"
            )
        model.load_state_dict(tensors)
        return model.eval()
