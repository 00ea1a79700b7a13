"""Checks whether an engine fits into a rank's memory, and lists settings that would reduce its use.

A remedy is the estimate of :mod:`colonnade.serve.memory_estimate` with one setting changed. If none is enough alone,
several are combined: those that save most first, until the rest of the memory holds a cache of useful size.
"""

import torch

from colonnade.config import Plan, format_bytes
from colonnade.config.feature_checks import check_quantised
from colonnade.config.memory_remedies import Changes, Option, combine, flags, merge
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.model import Transformer
from colonnade.model.moe.expert_offload import expert_modules
from colonnade.serve.cache_size import available_bytes, size_cache
from colonnade.serve.memory_estimate import (
    EngineSpec,
    MemoryNeeds,
    scratch_pages,
    supports_float8,
)

CACHE_SIZE = {"serve.pages", "serve.cache_bytes"}
"""Settings of the cache's size."""


def check_memory(spec: EngineSpec, in_use: int = 0, engines: int = 1) -> EngineSpec:
    """Return ``spec`` with the size of its cache.

    Raises :class:`CapacityError` if the cache holds no page, or, with a table, if ``spec`` does not fit. Available are
    the free memory of its device, divided among ``engines``, plus the ``in_use`` bytes of a loaded model, or
    serve.memory_bytes.
    """
    available = available_bytes(spec, in_use, engines)
    spec = size_cache(spec, available)
    serve, context = spec.resolved, spec.model.context
    if not spec.page_count:
        raise CapacityError(
            f"--serve.cache_bytes {serve.cache_bytes} is less than one page of {serve.page} tokens, which takes "
            f"{spec.page_bytes} bytes; use {spec.page_bytes * -(-context // serve.page)} for one whole context of "
            f"{context} tokens"
        )
    needs = spec.needs()
    if needs.total > available:
        raise CapacityError(refusal(spec, needs, available))
    return spec


def refusal(spec: EngineSpec, needs: MemoryNeeds, available: int) -> str:
    """A table of what ``spec`` needs, and the remedies."""
    lines = [f"this engine does not fit into the memory of a rank on {spec.device}. It needs"]
    lines.append(str(needs.use(available)))
    proposals = remedies(spec, needs, available)
    if proposals:
        lines.append("options, and what each would save:")
        for words, saved, note in proposals:
            lines.append(f"  {words:<30}{format_bytes(saved):>12}  ({note}, {_shortage(needs, saved, available)})")
        if needs.total - proposals[0][1] > available and (several := combined_remedy(spec, needs, available)):
            words, saved, tokens = several
            note = f"a cache of {tokens} tokens, {_shortage(needs, saved, available)}"
            lines.append(f"together:\n  {' '.join(words)}  {format_bytes(saved)}  ({note})")
    return "\n".join(lines)


def _shortage(needs: MemoryNeeds, saved: int, available: int) -> str:
    excess = needs.total - saved - available
    return "enough" if excess <= 0 else f"{format_bytes(excess)} still too much"


def remedies(spec: EngineSpec, needs: MemoryNeeds, available: int, number: int = 5) -> list[tuple[str, int, str]]:
    """(flags, bytes saved, note) of single settings: sufficient ones first, then by what they save."""
    search = _Search(spec, needs, available)
    singles = [(flags(option.strongest), saved, option.cost) for option, saved in search.savings()]
    return sorted(singles, key=lambda remedy: needs.total - remedy[1] > available)[:number]


def combined_remedy(spec: EngineSpec, needs: MemoryNeeds, available: int) -> tuple[list[str], int, int] | None:
    """(flags of several settings, bytes saved, tokens of the remaining cache): as few as suffice, or all that help.

    None if fewer than two settings help.
    """
    search = _Search(spec, needs, available)
    options = [option for option, _ in search.savings() if not option.strongest.keys() & CACHE_SIZE]
    options.sort(key=lambda option: "plan.tp" in option.strongest)  # more processes only if all else fails
    chosen = combine(options, search.reduces, search.fits_with_cache, drop_newest_first=True)
    if not search.fits(merge(chosen)):
        changes = merge(chosen)
        chosen.append(_cache_option(search.changed(changes), max(1, search.affordable_pages(changes))))
    if len(chosen) < 2:
        return None
    changed = search.changed(merge(chosen))
    tokens = _tokens(changed, _pages(changed))
    return [flags(option.strongest) for option in chosen], search.base.total - changed.needs().total, tokens


class _Search:
    """Estimates of ``spec`` with changed settings."""

    def __init__(self, spec: EngineSpec, needs: MemoryNeeds, available: int):
        self.spec = spec
        self.base = needs if spec.weights is None else spec.replace().needs()
        """The needs with the weights estimated, as those of changed settings are."""
        self.available = available - (needs.total - self.base.total)
        self._estimates: dict[str, MemoryNeeds | None] = {repr({}): self.base}

    def changed(self, changes: Changes) -> EngineSpec:
        """``spec`` with ``changes``, and its weights estimated."""
        serve = {name.removeprefix("serve."): value for name, value in changes.items() if name.startswith("serve.")}
        rest = {name.rpartition(".")[2]: value for name, value in changes.items() if not name.startswith("serve.")}
        if "dtype" in rest:
            rest["dtype"] = getattr(torch, str(rest["dtype"]))
        if "weights" in serve:
            rest["formats"] = {}  # those of the checkpoint no longer apply
        return self.spec.replace(serve=self.spec.serve.replace(**serve), **rest)

    def needs(self, changes: Changes) -> MemoryNeeds | None:
        """The needs with ``changes``; None if the model does not support them."""
        key = repr(changes)
        if key not in self._estimates:
            spec = self.changed(changes)
            try:
                Plan(tp=spec.tp, cp=spec.cp, ep=spec.ep, etp=spec.etp).check(spec.model)
                check_quantised(spec.model, spec.serve.weights, spec.serve.weight_group, spec.tp, spec.etp)
                self._estimates[key] = spec.needs()
            except ColonnadeError:
                self._estimates[key] = None
        return self._estimates[key]

    def savings(self) -> list[tuple[Option, int]]:
        """The options that save memory, with the bytes that each saves alone, largest first."""
        pages = self.affordable_pages({})
        options = [_cache_option(self.spec, pages if pages > 0 else _useful_pages(self.spec))]
        savings: list[tuple[Option, int]] = []
        for option in [*options, *_other_options(self.spec, self.base)]:
            needs = self.needs(option.strongest)
            if needs is not None and needs.total < self.base.total:
                savings.append((option, self.base.total - needs.total))
        return sorted(savings, key=lambda saving: -saving[1])

    def reduces(self, changes: Changes, other: Changes) -> bool:
        """Whether ``changes`` need less memory than ``other``."""
        needs, more = self.needs(changes), self.needs(other)
        return needs is not None and more is not None and needs.total < more.total

    def fits(self, changes: Changes) -> bool:
        """Whether the engine fits with ``changes``; also true for changes that the model does not support."""
        needs = self.needs(changes)
        return needs is None or needs.total <= self.available

    def fits_with_cache(self, changes: Changes) -> bool:
        """Whether the engine fits with ``changes`` and a smaller cache of useful size."""
        if self.needs(changes) is None:
            return False
        return self.fits(changes) or self.affordable_pages(changes) >= _useful_pages(self.spec)

    def affordable_pages(self, changes: Changes) -> int:
        """Pages of a rank's cache that fit in addition to everything else; below 1 if none do."""
        spec, needs = self.changed(changes), self.needs(changes)
        assert needs is not None, "the model supports the changes"
        return (self.available - (needs.total - needs.cache)) // spec.page_bytes - scratch_pages(
            spec.axes, spec.resolved
        )


def _pages(spec: EngineSpec) -> int:
    """Pages of a rank's cache that hold tokens."""
    return spec.page_count - scratch_pages(spec.axes, spec.resolved)


def _tokens(spec: EngineSpec, pages: int) -> int:
    """Tokens in ``pages`` pages on each rank."""
    return pages * spec.resolved.page * spec.cp


def _useful_pages(spec: EngineSpec) -> int:
    """Pages of a smaller cache: those of one whole context, or a quarter of the requested ones if that is less."""
    context = -(-spec.model.context // (spec.resolved.page * spec.cp))
    return max(1, min(context, _pages(spec) // 4))


def _cache_option(spec: EngineSpec, pages: int) -> Option:
    """A cache of ``pages`` pages on each rank."""
    cost = f"{_tokens(spec, pages)} tokens instead of {_tokens(spec, _pages(spec))}"
    if spec.serve.pages:
        return Option(cost, [{"serve.pages": pages * spec.cp}])
    return Option(cost, [{"serve.cache_bytes": pages * spec.page_bytes}])


def _other_options(spec: EngineSpec, needs: MemoryNeeds) -> list[Option]:
    """All options but a smaller cache."""
    serve, options = spec.serve, list[tuple[str, object, str]]()
    if (budget := spec.resolved.budget) > 64:
        options.append(("serve.token_budget", max(64, budget // 4), "prompts in more steps"))
    if serve.max_requests > 1:
        options.append(("serve.max_requests", max(1, serve.max_requests // 4), "more wait"))
    if needs.graphs:
        options.append(("serve.graph_capture", "False", "slower steps"))  # the flag takes None, True or False
    kind = "float8" if spec.model.latent is None else "int8"
    if serve.cache == "stored" and (kind == "int8" or supports_float8(spec.device)):
        options.append(("serve.cache", kind, "rounded"))
    for kind in ("int8", "int4"):
        if serve.weights not in (kind, "int4"):
            options.append(("serve.weights", kind, "rounded"))
    if spec.draft_spec is not None:
        options.append(("serve.draft", None, "no draft model"))
    if spec.model.moe is None:
        options.append(("plan.tp", 2 * spec.tp, f"{2 * spec.tp} processes"))
    elif (layers := len(expert_modules(Transformer(spec.model, device="meta")))) > 2 and spec.layers_on_device is None:
        options.append(("experts.layers_on_device", 2, f"of {layers} layers' experts"))
    if spec.dtype in (torch.float32, torch.float64):
        options.append(("dtype", "bfloat16", "other rounding"))
    return [Option(cost, [{name: value}]) for name, value, cost in options]
