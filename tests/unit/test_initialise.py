"""Initial weights: each parameter name has its own generator, the same in every process."""

import subprocess
import sys
import zlib

import torch

from colonnade.config import ModelConfig, MoeConfig
from colonnade.model import Transformer, initialise
from colonnade.model.initialise import generator, name_seed

MODEL = ModelConfig(
    vocab_size=50, layers=1, width=16, heads=2, ffn_width=16, moe=MoeConfig(experts=4, active=2, ffn_width=8)
)
COLLIDING = ("blocks.16.ffn.experts.up_bias.41158", "blocks.25.ffn.experts.up_bias.14")
"""Names with equal CRC-32 in a run of seed 0."""


def test_200_000_expert_names_have_distinct_seeds_and_values() -> None:
    names = [f"blocks.{layer}.ffn.experts.up.{e}" for layer in range(100) for e in range(2000)]
    assert len({name_seed(0, name) for name in names}) == len(names) == 200_000
    assert len({generator(0, name).random() for name in names[::100]}) == 2000


def test_names_of_equal_crc_get_different_values() -> None:
    assert len({zlib.crc32(f"0/{name}".encode()) for name in COLLIDING}) == 1
    one, two = (generator(0, name).standard_normal(8) for name in COLLIDING)
    assert not (one == two).any()


def test_each_expert_gets_its_own_initial_weights() -> None:
    up = initialise(Transformer(MODEL), 0).get_parameter("blocks.0.ffn.experts.up")
    assert len({expert.numpy().tobytes() for expert in up.detach()}) == 4
    assert torch.equal(initialise(Transformer(MODEL), 0).get_parameter("blocks.0.ffn.experts.up"), up)
    assert not torch.equal(initialise(Transformer(MODEL), 1).get_parameter("blocks.0.ffn.experts.up"), up)


def test_seeds_are_the_same_in_another_process() -> None:
    command = "from colonnade.model.initialise import generator; print(generator(3, 'embed.tokens.weight').random())"
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert float(output) == generator(3, "embed.tokens.weight").random()
