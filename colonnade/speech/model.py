"""A streaming speech recogniser, optionally audio-visual: front ends, encoder, transducer, CTC.

    frames    :mod:`colonnade.speech.front_end`
    encoder   :mod:`colonnade.model.segment_encoder` or :mod:`colonnade.model.conformer`
    loss      transducer + ½ (cross-entropy of the letters where the times of words are known, else CTC)

The letter head predicts a label for each 10 ms and is used for alignment. Without its loss the encoder learns nothing
for hundreds of steps, because the predictor learns the grammar first.
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
from colonnade.errors import CheckpointError, ConfigError, DataError, PlanError
from colonnade.kernels import ctc
from colonnade.model.conformer import ConformerEncoder
from colonnade.model.segment_encoder import SegmentEncoder
from colonnade.model.segments import Segments
from colonnade.model.transducer_loss import Joint
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.layout import WHOLE, local_part, placements
from colonnade.speech import nemotron
from colonnade.speech.features import FrameStream, features_of
from colonnade.speech.front_end import Frames, FrontEnd, stack_pictures
from colonnade.speech.letter_lm import Fusion
from colonnade.speech.predictor import LstmPredictor, StatelessPredictor
from colonnade.speech.search import BeamSearch, GreedySearch, Search
from colonnade.speech.word_times import UNKNOWN, WordTime, delayed_parts, word_times

LETTER_WEIGHT = 0.5


class SpeechModel(nn.Module):
    """Parameters are drawn from ``seed``, the same for every number of tp ranks.

    The encoder's heads and hidden units and the joint network's labels are sharded over tp; everything else is
    replicated.
    """

    def __init__(self, config: SpeechConfig, seed: int = 0, dtype: torch.dtype = torch.float32, axes: Axes = SOLO_AXES):
        super().__init__()
        if config.heads % axes.tp.size:
            raise PlanError(
                f"{config.heads} heads cannot be divided over tp={axes.tp.size}; use a divisor of the heads"
            )
        self.config, self.axes = config, axes
        self.all_sizes = [Segments(*sizes) for sizes in config.trained_sizes]
        """All trained sizes."""
        S, L, R, M = (max(own) for own in zip(*config.trained_sizes, strict=True))
        self.largest_sizes = Segments(S, L, R, M)
        self.sizes = self.choose_segments()
        D, J, V = config.width, config.joint_width, config.vocab_size
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.front_end = FrontEnd(config)
            if config.family == "conformer":
                self.encoder = ConformerEncoder(config.encoder, config.conv_kernel, config.conv_bias, axes)
            else:
                self.encoder = SegmentEncoder(config.encoder, axes)
            self.out = nn.Linear(D, J)
            self.letters = nn.Linear(D, config.parts * V) if config.letter_head else None
            lstm = config.predictor == "lstm"
            P = config.predictor_width or J
            self.predictor = (
                LstmPredictor(P, V, J, config.predictor_layers, norm=config.predictor_norm)
                if lstm
                else StatelessPredictor(P, V, J)
            )
            self.joint = Joint(J, V, tp=axes.tp)
            whole_VD = torch.empty(V, J).normal_(std=J**-0.5)
            with torch.no_grad():
                self.joint.weight.copy_(local_part(whole_VD, self.joint.layout["weight"], axes))
        self.encoder.initialise(seed)
        self.to(dtype)
        self.sound = features_of(config, dtype)

    def choose_segments(self, segment: int | None = None, lookahead: int | None = None) -> Segments:
        """The sizes of a stream: its own S and R, in frames, if given.

        Raises ConfigError for sizes that the recogniser was not trained with.
        """
        config = self.config
        segment = config.segment if segment is None else segment
        lookahead = config.right if lookahead is None else lookahead
        segments, lookaheads = config.trained_segments, config.trained_lookaheads
        if segment not in segments or lookahead not in lookaheads:
            raise ConfigError(
                f"segment {segment} and lookahead {lookahead}: this recogniser was trained with segments of "
                f"{', '.join(map(str, segments))} and lookaheads of {', '.join(map(str, lookaheads))} frames of "
                f"{config.parts * 10} ms; "
                "use one of each, or train it with speech train --segments and --lookaheads"
            )
        return self.all_sizes[segments.index(segment) * len(lookaheads) + lookaheads.index(lookahead)]

    def features(self, samples: Tensor) -> Tensor:
        """The features of a whole recording at 16 kHz, (T, A); the last frame is padded."""
        stream = FrameStream(self.sound)
        return torch.cat((stream.push(samples), stream.end()))

    def frames(self, sound_TA: Tensor, pictures: Tensor | None = None) -> Tensor:
        """x_TD of a whole recording's features and its first pictures, (t, height, width)."""
        pictures = None if pictures is None or not len(pictures) else pictures[: len(sound_TA)]
        if pictures is None or not self.config.picture:
            return self.front_end(Frames(sound_TA, pictures_seen=pictures))
        history = self.config.picture_history
        padded = torch.cat((pictures.new_zeros(history, *pictures.shape[1:]), pictures))
        seen_T = torch.arange(len(sound_TA), device=sound_TA.device) < len(pictures)
        return self.front_end(Frames(sound_TA, None, stack_pictures(padded, history), seen_T))

    def encode(self, x_TD: Tensor, lengths: Sequence[int], sizes: Segments | None = None) -> Tensor:
        """The encoded frames of whole recordings."""
        return self.encoder(x_TD, (sizes or self.sizes).batch(lengths, x_TD.device))

    def letter_logprobs(self, y_TD: Tensor) -> Tensor:
        """Log-probabilities of the labels of each 10 ms, (parts·T, V); raises ConfigError without a letter head."""
        if self.letters is None:
            raise ConfigError("this recogniser has no letter head, so it cannot align; train one with speech train")
        return self.letters(y_TD).view(-1, self.config.vocab_size).log_softmax(1)

    def loss(
        self,
        x_TD: Tensor,
        lengths: Sequence[int],
        labels: Sequence[Sequence[int]],
        letters_P: Tensor | None = None,
        sizes: Segments | None = None,
    ) -> Tensor:
        """The loss per label, averaged over the batch.

        ``letters_P`` are the letter targets of all recordings, one per 10 ms, UNKNOWN for a recording without times.
        """
        y_TD = self.encode(x_TD, lengths, sizes)
        transducer = self.joint.loss(self.out(y_TD), self.predictor(labels), lengths, labels).sum()
        side = transducer.new_zeros(()) if self.letters is None else self._letter_loss(y_TD, lengths, labels, letters_P)
        return (transducer + LETTER_WEIGHT * side) / max(1, sum(map(len, labels)))

    def _letter_loss(
        self, y_TD: Tensor, lengths: Sequence[int], labels: Sequence[Sequence[int]], letters_P: Tensor | None
    ) -> Tensor:
        """The sum over frames of the letter head's cross-entropy, or of CTC for recordings without times."""
        assert self.letters is not None
        logprobs_PV, parts = self.letter_logprobs(y_TD), self.config.parts
        if letters_P is None:
            letters_P = torch.full((len(logprobs_PV),), UNKNOWN, device=y_TD.device)
        side = F.nll_loss(logprobs_PV, letters_P, ignore_index=UNKNOWN, reduction="sum") / parts
        targets_P = (letters_P == UNKNOWN).split([parts * n for n in lengths])
        unknown_B = torch.stack([own.any() for own in targets_P]).tolist()  # one wait for the GPU
        untimed = [i for i, unknown in enumerate(unknown_B) if unknown]
        if untimed:
            # One label per frame, from the mean of its logits: CTC learns far worse with four times as many labels.
            frames = self.letters(y_TD).unflatten(1, (parts, -1)).mean(1).log_softmax(1).split(list(lengths))
            padded = nn.utils.rnn.pad_sequence([frames[i] for i in untimed])
            targets = torch.tensor([label for i in untimed for label in labels[i]], device=y_TD.device)
            T_B, U_B = torch.tensor([lengths[i] for i in untimed]), torch.tensor([len(labels[i]) for i in untimed])
            side = side + F.ctc_loss(padded, targets, T_B, U_B, reduction="sum", zero_infinity=True)
        return side

    def search(self, streams: int, beam: int | None = None, fusion: Fusion | None = None) -> Search:
        """A search over ``streams`` streams: greedy, or with ``beam`` hypotheses of each and a language model."""
        most = self.config.max_labels
        if fusion is not None:
            fusion.check(self.config)
        if beam is None:
            if fusion is not None:
                raise ConfigError("greedy search does not use a language model; set a beam, such as 10")
            return GreedySearch(self.predictor, self.joint.logprobs, streams, max_labels=most)
        return BeamSearch(self.predictor, self.joint.logprobs, streams, beam=beam, max_labels=most, fusion=fusion)

    @torch.inference_mode()
    def recognise(
        self,
        samples: Tensor,
        pictures: Tensor | None = None,
        sizes: Segments | None = None,
        beam: int | None = None,
        fusion: Fusion | None = None,
    ) -> str:
        """The text of a whole recording, by greedy or beam search; equal to what streams of the same sizes give."""
        sound_TA = self.features(samples)
        if not len(sound_TA):
            return ""
        return self.texts(self.frames(sound_TA, pictures), [len(sound_TA)], sizes, beam, fusion)[0]

    @torch.inference_mode()
    def texts(
        self,
        x_TD: Tensor,
        lengths: Sequence[int],
        sizes: Segments | None = None,
        beam: int | None = None,
        fusion: Fusion | None = None,
    ) -> list[str]:
        """The transcripts of whole recordings, by greedy or beam search over all together."""
        search = self.search(len(lengths), beam, fusion)
        found = search.deltas(self.out(self.encode(x_TD, lengths, sizes)).split(list(lengths)))
        texts = [self.config.text([*labels, *search.finish(i)]) for i, labels in enumerate(found)]
        return [text.removeprefix(" ") for text in texts] if self.config.pieces else texts

    @torch.inference_mode()
    def align(self, samples: Tensor, text: str, pictures: Tensor | None = None) -> list[WordTime]:
        """The time of each word of a known text, by the best path through the letter head's labels."""
        if self.config.pieces:
            raise ConfigError("this recogniser's labels are pieces of words, and only letters are aligned; use another")
        sound_TA = self.features(samples)
        labels = self.config.labels(text)
        if not text.strip():
            raise DataError("the text to align is empty; pass the words that are spoken")
        if not len(sound_TA):
            raise DataError("a recording of 0 samples has no words; use a longer one")
        y_TD = self.encode(self.frames(sound_TA, pictures), [len(sound_TA)])
        spans = ctc.align(self.letter_logprobs(y_TD), labels)
        return word_times(text, spans, delayed_parts(self.config))

    def save(
        self, folder: Path, overwrite: bool = False, state: dict[str, Tensor] | None = None, step: int = 0
    ) -> None:
        """Write a checkpoint atomically; ``state`` is the optimizer's. Raises PlanError for a shard of a model."""
        if self.axes.tp.size > 1:
            raise PlanError(f"a recogniser over tp={self.axes.tp.size} cannot be saved; save it from one process")
        create_partial(folder, overwrite)
        partial = partial_path(folder)
        write_json(partial / "speech.json", {"config": self.config.model_dump(), "step": step})
        write_tensors(partial / "model.safetensors", {k: v.contiguous() for k, v in self.state_dict().items()})
        if state is not None:
            write_tensors(partial / "optimizer.safetensors", state)
        commit(folder, {})

    @staticmethod
    def load(folder: Path, axes: Axes = SOLO_AXES, dtype: torch.dtype = torch.float32) -> "SpeechModel":
        """Read a checkpoint, this rank's share of it; raises CheckpointError for an incomplete or foreign one.

        ``folder`` may also be a nemotron_asr_streaming model in Hugging Face's format.
        """
        if nemotron.is_nemotron(folder):
            config = nemotron.read_config(folder)
            return _filled(folder, config, nemotron.read_weights(folder, config), axes, dtype)
        Manifest.read(folder).check_sizes(folder)
        if not (folder / "speech.json").is_file():
            raise CheckpointError(f"{folder} is not a speech recogniser; use a folder written by speech train")
        config = SpeechConfig(**read_json(folder / "speech.json").get("config", {}))
        try:
            tensors = load_file(folder / "model.safetensors")
        except SafetensorError as why:
            raise CheckpointError(f"{folder}: the weights cannot be read: {why}; use another checkpoint") from None
        return _filled(folder, config, tensors, axes, dtype)


def _filled(
    folder: Path, config: SpeechConfig, tensors: dict[str, Tensor], axes: Axes, dtype: torch.dtype
) -> SpeechModel:
    """A model with this rank's share of ``tensors``."""
    model = SpeechModel(config, 0, dtype, axes)
    shapes = {name: x.shape for name, x in tensors.items()}
    whole = model if axes.tp.size == 1 else SpeechModel(config)
    if shapes != {name: x.shape for name, x in whole.state_dict().items()}:
        raise CheckpointError(f"{folder}: the weights do not match the config; restore it or use another checkpoint")
    layout = placements(model)
    model.load_state_dict({name: local_part(x, layout.get(name, WHOLE), axes) for name, x in tensors.items()})
    return model.eval()
