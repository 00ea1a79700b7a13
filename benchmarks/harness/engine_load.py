"""Requests for engines: prompts and answers of random lengths, and a tokenizer with a word for each token."""

import random
import time
from typing import NamedTuple

import tokenizers

from colonnade.data.tokenizer import Tokenizer
from colonnade.serve import Engine, SamplingParams


class Load(NamedTuple):
    """Prompts, and the number of tokens of each answer."""

    prompts: list[list[int]]
    counts: list[int]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(self.counts)

    def first(self, n: int) -> "Load":
        """The first ``n`` requests."""
        return Load(self.prompts[:n], self.counts[:n])

    def short(self, most: int) -> "Load":
        """The same prompts with answers of at most ``most`` tokens."""
        return Load(self.prompts, [min(most, count) for count in self.counts])


class EngineRun(NamedTuple):
    """Time and answers of one run of one side."""

    seconds: float
    answers: list[list[int]]


def random_load(requests: int, least: int, most: int, vocab_size: int, seed: int = 0) -> Load:
    """Prompts of random tokens; their lengths and the answers' are uniform in [least, most]."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocab_size) for _ in range(draw.randint(least, most))] for _ in range(requests)]
    return Load(prompts, [draw.randint(least, most) for _ in range(requests)])


def all_batch_sizes(requests: int) -> Load:
    """Requests such that one ends at each step, so that every batch size occurs."""
    return Load([[1]] * requests, list(range(1, requests + 1)))


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with a word for every id, so that detokenizing random tokens costs time."""
    model = tokenizers.models.WordLevel({f"w{i} ": i for i in range(vocab_size)}, unk_token="w0 ")
    return Tokenizer(tokenizers.Tokenizer(model), bos_id=None, eos_ids=(), chat_template=None)


def decode_rate(engine: Engine) -> float:
    """Tokens per CPU second [1/s] until all requests of ``engine`` are complete."""
    began, tokens = time.process_time(), 0
    while engine.busy:
        tokens += len(engine.step())
    return tokens / (time.process_time() - began)


def print_run(who: str, took: EngineRun) -> EngineRun:
    """Print the time at once, since the other side may take minutes."""
    print(f"{who}: {sum(map(len, took.answers))} tokens in {took.seconds:.1f} s", flush=True)
    return took


def run_colonnade(engine: Engine, load: Load) -> EngineRun:
    began = time.perf_counter()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in load.counts]
    answers = [list(completion.token_ids) for completion in engine.generate(load.prompts, params)]
    return print_run("colonnade", EngineRun(time.perf_counter() - began, answers))
