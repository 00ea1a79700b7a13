"""A loaded model as a language model of lm-eval (EleutherAI's evaluation harness).

Log-likelihoods come from :class:`~colonnade.evaluate.scorer.Scorer`, text from the serving engine. Contexts are encoded
and truncated as by lm-eval's own ``HFLM``, so that the scores are equal. On several ranks rank 0 runs the harness, and
data ranks share its requests.
"""

import json
from collections import defaultdict
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from colonnade.config import ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.evaluate.scorer import GENERATE, Request, Scorer
from colonnade.parallel.axis import Axis
from colonnade.serve.engine import Engine
from colonnade.serve.sampling_params import SamplingParams

MAX_GENERATED = 256
"""Tokens to generate if a task sets no limit (HFLM's default)."""
_IGNORED = {"do_sample", "temperature", "until", "max_gen_toks", "max_tokens", "max_new_tokens", "num_beams"}


class HarnessModel(TemplateLM):
    """The model that ``scorer`` scores; ``serve`` configures the engine that is made when text is generated."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, serve: ServeConfig, name: str):
        super().__init__()
        self._scorer, self._tokens, self._name = scorer, tokenizer, name
        self._generator = _Generator(scorer, tokenizer, serve)
        self._encoded = dict[str, list[int]]()
        self.batch_size = scorer.budget_tokens  # reported by lm-eval

    @property
    def eot_token_id(self) -> int:
        """The first end token."""
        if not self._tokens.eos_ids:
            raise ConfigError(f"the tokenizer of {self._name} has no end token; set eos_token in its configuration")
        return self._tokens.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the end token if there is no BOS."""
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    @property
    def max_length(self) -> int:
        """The model's context."""
        return self._scorer.model.config.context

    @property
    def tokenizer_name(self) -> str:
        """Part of the key of cached requests."""
        return f"{self._name}-{self._tokens.fingerprint}"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""
        return self._tokens.chat(list(chat_history), add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of ``string``; with BOS if the tokenizer adds it and the text does not begin with it."""
        if add_special_tokens is None:
            if (ids := self._encoded.get(string)) is not None:
                return ids
            add_special_tokens = self._adds_bos(string)
        return self._tokens.encode(string, special=add_special_tokens)

    def _adds_bos(self, string: str) -> bool:
        bos = self._tokens.bos_id
        prefix = None if bos is None else self._tokens.token(bos)
        return not (prefix and string.startswith(prefix))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """The log-likelihood of each text after its context, and whether each token is the argmax."""
        # All texts are encoded at once, on several cores, and a context of several requests once.
        texts = dict.fromkeys(
            text
            for context, continuation in (tuple[str, str](request.args) for request in requests)
            if context
            for text in (context.rstrip(), context + continuation)
        )
        for special in (True, False):
            some = [text for text in texts if self._adds_bos(text) == special]
            self._encoded.update(zip(some, self._tokens.encode_batch(some, special), strict=True))
        try:
            return super().loglikelihood(requests, disable_tqdm=True)  # its bar is that of encoding
        finally:
            self._encoded.clear()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scores = self._scorer.score([Request(list(context), list(targets)) for _, context, targets in requests])
        for (key, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, tuple(score))
        return [(score.logp, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of the context."""
        windows, owners = list[Request](), list[int]()
        for number, request in enumerate(requests):
            parts = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            for context, targets in map(utils.make_disjoint_window, parts):
                windows.append(Request(list(context), list(targets)))
                owners.append(number)
        sums: defaultdict[int, float] = defaultdict(float)
        for number, score in zip(owners, self._scorer.score(windows), strict=True):
            sums[number] += score.logp
        return [sums[number] for number in range(len(requests))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to a stop string; all requests are passed to the engine at once."""
        asked = list[tuple[list[int], dict[str, Any]]]()
        for request in requests:
            context, given = tuple[Any, Any](request.args)
            limit = sampling(given).max_tokens or MAX_GENERATED
            if limit >= self.max_length:
                raise ConfigError(
                    f"a task generates {limit} tokens, and the model's context is {self.max_length}; use a model with "
                    "a longer one"
                )
            asked.append((self.tok_encode(context)[-(self.max_length - limit) :], dict(given)))
        data = json.dumps(asked).encode()
        self._scorer.send(GENERATE, data=data)
        return self._generator.run(data)


def sampling(given: dict[str, Any]) -> SamplingParams:
    """The parameters for a task's generation arguments, those of transformers."""
    until = given.get("until") or []
    limit = next((int(given[name]) for name in ("max_gen_toks", "max_tokens", "max_new_tokens") if name in given), 0)
    sample = bool(given.get("do_sample", float(given.get("temperature", 0) or 0) > 0))
    more = {name: value for name, value in given.items() if name not in _IGNORED}
    known = {name: more.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in more}
    if more or given.get("num_beams", 1) != 1:
        names = ", ".join(more) or "num_beams"
        raise ConfigError(f"a task generates with {names}, which the engine does not support; remove it from the task")
    return SamplingParams(
        temperature=float(given.get("temperature", 1.0)) if sample else 0.0, max_tokens=limit or MAX_GENERATED,
        seed=1234, stop=[until] if isinstance(until, str) else list(until), **known,
    )  # fmt: skip


class _Generator:
    """Generates a replica's share of the outputs, on every rank of the model's layout."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, serve: ServeConfig):
        self._scorer, self._tokens, self._serve = scorer, tokenizer, serve
        self._engine: Engine | None = None

    def run(self, data: bytes) -> list[str]:
        """The texts after the prompts in ``data``, JSON pairs of ids and generation arguments; on rank 0."""
        scorer = self._scorer
        if self._engine is None:
            self._engine = Engine(scorer.model, self._tokens, self._serve)
        if scorer.ranks.rank:
            self._engine.follow()
            return []
        asked = json.loads(data)
        mine = asked[scorer.data.rank :: scorer.data.size]
        try:
            completions = self._engine.generate([ids for ids, _ in mine], [sampling(given) for _, given in mine])
        finally:
            self._engine.stop()
        texts = [""] * len(asked)
        for rank, share in enumerate(_gather_texts(scorer.data, [completion.text for completion in completions])):
            texts[rank :: scorer.data.size] = share
        return texts


def _gather_texts(axis: Axis, texts: list[str]) -> list[list[str]]:
    """Each rank's ``texts``."""
    own = torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8)
    counts = axis.all_gather_(torch.tensor(len(own))).tolist()
    parts = axis.all_gather_uneven_(own, counts).split(counts)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def follow(scorer: Scorer, tokenizer: Tokenizer, serve: ServeConfig) -> None:
    """On ranks above 0: run the passes that rank 0's :class:`HarnessModel` sends."""
    scorer.follow(_Generator(scorer, tokenizer, serve).run)
