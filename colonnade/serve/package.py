"""Runs exported packages (:mod:`colonnade.compress.export`): one sequence at a time, without an engine.

Loading maps the weights into memory. Sampling is the engine's, so that the same seed gives the same tokens.
"""

import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from colonnade.checkpoint.digest import Digest, digest_of
from colonnade.checkpoint.package_format import DECODE, PREFILL, TOKENIZER, WEIGHTS, load_program, open_package
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, RequestError
from colonnade.kernels.sampling import greedy
from colonnade.parallel.axis import SOLO
from colonnade.serve.logits_processor import LogitsProcessor
from colonnade.serve.prompts import check_vocabulary, context_error, token_ids
from colonnade.serve.sample_args import NOT_FINITE, SampleArgs
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.text_stream import TextStream

SLOT_STEP = 128
"""A pass attends to the written slots of the cache, rounded up to a multiple of this."""
STEPWISE_TOKENS = 8
"""A prompt of up to this many new tokens runs in decode steps."""
SUPPORTED = {
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_token_ids", "max_tokens", "ignore_eos",
    "skip_special_tokens", "min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias",
    "bad_words",
}  # fmt: skip
"""Fields of :class:`SamplingParams` that a package can follow."""
NEED_TOKENIZER = ("stop", "min_tokens", "bad_words")
"""Those of them that need a tokenizer."""


class Package:
    """A loaded package and the cache of one sequence."""

    def __init__(self, folder: Path | str, *, trust: bool, digest: Callable[[Path], Digest] = digest_of):
        """Load ``folder``; raises what :func:`open_package` raises, which uses ``digest``."""
        folder = Path(folder)
        self.folder, self.info = folder, open_package(folder, trust=trust, digest=digest)
        self.tokenizer = Tokenizer.from_model(folder / TOKENIZER)
        info, programs = self.info, [folder / DECODE, folder / PREFILL]
        if info.pt2e is None:
            weights = load_file(folder / WEIGHTS)
            self._decode, self._prefill = (_with_weights(path, weights) for path in programs)
        else:
            self._decode, self._prefill = map(load_program, programs)
        shape = (info.context + info.prefill, *info.cache_row)
        self._cache = [torch.zeros(shape, dtype=getattr(torch, info.dtype)) for _ in range(info.model.layers)]
        self._tokens: list[int] = []
        """Those with keys and values in the cache."""

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """logits_V after ``ids``; the beginning that is already in the cache is not recomputed."""
        same = next((i for i, (a, b) in enumerate(zip(ids, self._tokens, strict=False)) if a != b), None)
        if same is None:
            same = min(len(ids) - 1, len(self._tokens))
        del self._tokens[same:]
        while True:
            left = len(ids) - len(self._tokens)
            tokens = ids[len(self._tokens) :][: 1 if left <= STEPWISE_TOKENS else self.info.prefill]
            logits_V = self._run(tokens)
            if left == len(tokens):
                return logits_V

    def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> Generator[tuple[str, int]]:
        """(text, token) of each token that continues ``prompt``, as an engine returns them.

        A bad request is refused immediately: :class:`RequestError`.
        """
        info, tokenizer = self.info, self.tokenizer
        for field in fields(params):
            if field.name not in SUPPORTED and getattr(params, field.name) != getattr(SamplingParams(), field.name):
                raise RequestError(f"a package does not support {field.name}; remove it, or load the model itself")
            if tokenizer is None and field.name in NEED_TOKENIZER and getattr(params, field.name):
                raise RequestError(f"{field.name} needs a tokenizer, and {self.folder} has none; remove it")
        if isinstance(prompt, str) and tokenizer is None:
            raise CheckpointError(f"{self.folder} has no tokenizer; pass token ids")
        encoded = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer is not None else prompt
        ids = list(token_ids(encoded, info.model.vocab_size, "the prompt"))
        check_vocabulary(params.stop_token_ids, info.model.vocab_size, "stop_token_ids")
        check_vocabulary(params.logit_bias, info.model.vocab_size, "logit_bias")
        left = info.context - len(ids)
        if left < (params.max_tokens or 1):
            raise context_error(len(ids), params.max_tokens, info.context)
        return self._stream(ids, params, left if params.max_tokens is None else params.max_tokens)

    def _stream(self, ids: list[int], params: SamplingParams, limit: int) -> Generator[tuple[str, int]]:
        eos_ids = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_ids
        seed = uuid.uuid4().int >> 65 if params.seed is None else params.seed
        text, processor = None, LogitsProcessor.of(ids, params, self.tokenizer, None)
        if self.tokenizer is not None:
            text = TextStream(self.tokenizer.detokenizer(params.skip_special_tokens), params.stop)
        for index in range(limit):
            args = SampleArgs.of(params, seed, index, processor.changes(ids, index) if processor else None)
            token = self._sample(self.logits(ids)[None], args)
            if token == NOT_FINITE:
                raise RequestError("the model's logits are not finite; export it again in float32")
            if processor is not None:
                processor.accept(token)
            is_end = token in eos_ids or token in params.stop_token_ids
            piece = "" if text is None or is_end else text.push(token, may_stop=index + 1 >= params.min_tokens)
            done = is_end or index + 1 == limit or (text is not None and text.stopped)
            if done and text is not None:
                piece += text.finish()
            yield piece, token
            if done:
                return
            ids.append(token)

    def _sample(self, logits_1V: Tensor, args: SampleArgs) -> int:
        if args.greedy and args.changes is None:
            return int(greedy(logits_1V, NOT_FINITE))
        from colonnade.serve.sampler import sample_and_score  # its imports take 0.1 s of CPU time

        return int(sample_and_score(logits_1V, [args], SOLO, self.info.model.vocab_size).tokens_R)

    def _run(self, tokens: Sequence[int]) -> Tensor:
        start, count = len(self._tokens), len(tokens)
        program, width = (self._decode, 1) if count == 1 else (self._prefill, self.info.prefill)
        used = min(len(self._cache[0]), -(-(start + width) // SLOT_STEP) * SLOT_STEP)
        tokens_T = torch.tensor([*tokens, *[0] * (width - count)])
        cache = [layer[:used] for layer in self._cache]
        (logits_V,) = program.run([tokens_T, torch.tensor(start), torch.tensor(count - 1), *cache])
        self._tokens += tokens
        return logits_V


def _with_weights(path: Path, weights: dict[str, Tensor]) -> Any:
    """The program in ``path``, with ``weights`` as its constants, which it does not copy."""
    program = load_program(path)
    names = program.get_constant_fqns()
    if missing := sorted({*names} - {*weights}):  # torch would crash
        raise CheckpointError(
            f"{path.parent / WEIGHTS} lacks {missing[0]}, which {path.name} needs; export the model again"
        )
    program.load_constants({name: weights[name] for name in names}, False, True, True)
    return program
