"""Steps of fixed shape: their sizes, and that what pads them is nobody's."""

from colonnade.config import ServeConfig
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.fixed import padded
from tests.serve import tiny


def test_sizes_are_few_and_near():
    for most in (1, 7, 64, 300):
        sizes = [padded(n, most) for n in range(1, most + 1)]
        assert sizes == sorted(sizes)
        assert all(n <= size < 1.25 * n or size == n for n, size in enumerate(sizes, start=1))
        assert sizes[-1] == most and len(set(sizes)) <= 4 * most.bit_length()


def test_padding_writes_where_nobody_reads():
    """The last page of the cache is given to no request, and is all that padding touches."""
    model, params = tiny.model(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    limits = ServeConfig(pages=30, page_tokens=4, max_requests=12)
    plain, fixed = (Engine(model, tiny.tokenizer(), limits.but(fixed_steps=f)) for f in (False, True))
    prompts = [[i + 1, 2 * i] for i in range(9)]
    assert fixed.generate(prompts, params) == plain.generate(prompts, params)
    assert fixed.scheduler.pool.pages == fixed.stats.pages == plain.cache.pages == fixed.cache.pages - 1
    for ours, whole in zip([*fixed.cache.k, *fixed.cache.v], [*plain.cache.k, *plain.cache.v], strict=True):
        assert ours[-1].any(), "nine requests are padded to ten"
        assert float((ours[:-1] - whole).abs().max()) < 1e-12
