"""Whether an engine fits into a rank's memory, and what would help where it does not.

A remedy is the reckoning of :mod:`colonnade.serve.memory_estimate` with one setting changed. Where none is enough by
itself, several are taken together: those that save most first, until what is left holds a cache that is still of use.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from colonnade.config import Plan, size
from colonnade.config.feature_checks import check_quantised as check_weights
from colonnade.errors import CapacityError, ColonnadeError
from colonnade.model import Transformer
from colonnade.model.moe.expert_offload import experts_of
from colonnade.parallel.device_memory import usable_bytes
from colonnade.serve.memory_estimate import (  # fmt: skip
    Asked,
    Needs,
    page_bytes_of,
    pages_of,
    spare_pages,
    widens_float8,
)

CACHE = {"pages", "cache_bytes"}
"""Settings that say how large the cache is."""


@dataclass(frozen=True)
class _Remedy:
    """Settings changed, and what is to be said of them."""

    flags: str
    note: str
    serve: dict[str, Any] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)

    def of(self, asked: Asked) -> Asked:
        """``asked`` with them."""
        return asked.but(serve=asked.serve.but(**self.serve), **self.rest)

    @property
    def names(self) -> set[str]:
        """What it changes."""
        return {*self.serve, *self.rest}


def check_room(asked: Asked, held: int = 0) -> None:
    """Raise :class:`CapacityError` when the cache holds not one page, and with a table when ``asked`` does not fit into
    what is free on its device (or into ``serve.memory_bytes``), of which ``held`` bytes are the model's already.
    """
    serve, context = asked.settled, asked.model.context
    if not pages_of(asked.model, asked.axes, serve, asked.dtype):
        page_bytes, page = page_bytes_of(asked.model, asked.axes, serve, asked.dtype), serve.page
        raise CapacityError(
            f"--serve.cache_bytes {serve.cache_bytes} holds no page of {page} tokens, which takes {page_bytes} bytes; "
            f"give {page_bytes * -(-context // page)} for one whole context of {context} tokens"
        )
    there = asked.serve.memory_bytes or usable_bytes(asked.device) + held
    needs = asked.needs()
    if needs.total > there:
        raise CapacityError(told(asked, needs, there))


def told(asked: Asked, needs: Needs, there: int) -> str:
    """The table, and what would help."""
    lines = [f"this engine does not fit into a rank's memory on {asked.device}. It asks for", needs.table(there)]
    found = remedies(asked, needs, there)
    if found:
        lines.append("what would help, and what it would save:")
        for flags, saves, note in found:
            lines.append(f"  {flags:<30}{size(saves):>12}  ({note}, {_left(needs, saves, there)})")
        if needs.total - found[0][1] > there and (several := together(asked, needs, there)):
            flags, saves, tokens = several
            what = f"a cache of {tokens} tokens, {_left(needs, saves, there)}"
            lines.append(f"together:\n  {' '.join(flags)}  {size(saves)}  ({what})")
    return "\n".join(lines)


def _left(needs: Needs, saves: int, there: int) -> str:
    over = needs.total - saves - there
    return "enough" if over <= 0 else f"{size(over)} still too much"


def remedies(asked: Asked, needs: Needs, there: int, number: int = 5) -> list[tuple[str, int, str]]:
    """(flags, bytes that they save, what else is to be said): first what is enough, then what saves most."""
    found = [(remedy.flags, saves, remedy.note) for remedy, saves in _found(asked, needs, there)]
    return sorted(found, key=lambda one: needs.total - one[1] > there)[:number]


def together(asked: Asked, needs: Needs, there: int) -> tuple[list[str], int, int] | None:
    """(flags of several remedies, bytes that they save, tokens of the cache that is left): no more than are needed, or
    all; None where there are no two.
    """
    base, chosen = _anew(asked, needs), list[_Remedy]()
    more = there - (needs.total - base.total)  # what is there, for weights that are reckoned

    def enough(remedies: list[_Remedy]) -> bool:
        at = _with(asked, remedies)
        after = _needs(at)
        return after is not None and (after.total <= more or _room(at, after, more) >= _useful(asked))

    others = [remedy for remedy, _ in _found(asked, needs, there) if not remedy.names & CACHE]
    now = base
    for remedy in sorted(others, key=lambda remedy: "tp" in remedy.names):  # more processes: if all else fails
        after = None if any(remedy.names & one.names for one in chosen) else _needs(_with(asked, [*chosen, remedy]))
        if after is None or after.total >= now.total:
            continue
        chosen, now = [*chosen, remedy], after
        if enough(chosen):
            for spare in chosen[-2::-1]:  # those that save least first
                if enough(rest := [one for one in chosen if one is not spare]):
                    chosen = rest
            break
    at = _with(asked, chosen)
    if (after := _needs(at)) is not None and after.total > more:
        chosen.append(_cache(at, max(1, _room(at, after, more))))
        at = _with(asked, chosen)
    saves = base.total - at.needs().total
    return ([one.flags for one in chosen], saves, _tokens(at, _pages(at))) if len(chosen) > 1 else None


def _with(asked: Asked, remedies: list[_Remedy]) -> Asked:
    """``asked`` with all of them, and its weights reckoned."""
    return functools.reduce(lambda at, remedy: remedy.of(at), remedies, asked.but())


def _found(asked: Asked, needs: Needs, there: int) -> list[tuple[_Remedy, int]]:
    """Remedies that can be, with the bytes that each saves alone, those that save most first."""
    base, found = _anew(asked, needs), list[tuple[_Remedy, int]]()
    room = _room(asked, needs, there)
    for remedy in [_cache(asked, room if room > 0 else _useful(asked)), *_others(asked, needs)]:
        after = _needs(remedy.of(asked))
        if after is not None and base.total > after.total:
            found.append((remedy, base.total - after.total))
    return sorted(found, key=lambda one: -one[1])


def _anew(asked: Asked, needs: Needs) -> Needs:
    """``needs``, but of weights that are there already what they would be reckoned to take."""
    return needs if asked.weights is None else asked.but().needs()


def _needs(asked: Asked) -> Needs | None:
    """What it asks for; None where the model cannot be so."""
    serve = asked.serve
    try:
        Plan(tp=asked.tp, cp=asked.cp, ep=asked.ep, sh=asked.sh).check(asked.model)
        check_weights(asked.model, serve.weights, serve.weight_group, asked.tp, asked.sh)
        return asked.needs()
    except ColonnadeError:
        return None


def _room(asked: Asked, needs: Needs, there: int) -> int:
    """Pages of a rank's cache for which there is room beside all else; below 1 where there is none."""
    page_bytes = page_bytes_of(asked.model, asked.axes, asked.settled, asked.dtype)
    return (there - (needs.total - needs.cache)) // page_bytes - spare_pages(asked.axes, asked.settled)


def _pages(asked: Asked) -> int:
    """Pages of a rank's cache for tokens."""
    return pages_of(asked.model, asked.axes, asked.settled, asked.dtype) - spare_pages(asked.axes, asked.settled)


def _tokens(asked: Asked, pages: int) -> int:
    """Tokens in so many pages on each rank."""
    return pages * asked.settled.page * asked.cp


def _useful(asked: Asked) -> int:
    """Pages of a smaller cache than is asked for: those of one whole context, or a quarter where that is less."""
    context = -(-asked.model.context // (asked.settled.page * asked.cp))
    return max(1, min(context, _pages(asked) // 4))


def _cache(asked: Asked, pages: int) -> _Remedy:
    """A cache of ``pages`` pages on each rank."""
    page_bytes = page_bytes_of(asked.model, asked.axes, asked.settled, asked.dtype)
    note = f"{_tokens(asked, pages)} tokens instead of {_tokens(asked, _pages(asked))}"
    if asked.serve.pages:
        return _Remedy(f"--serve.pages {pages * asked.cp}", note, {"pages": pages * asked.cp})
    return _Remedy(f"--serve.cache_bytes {pages * page_bytes}", note, {"cache_bytes": pages * page_bytes})


def _others(asked: Asked, needs: Needs) -> list[_Remedy]:
    """All but a smaller cache."""
    serve, found = asked.serve, list[_Remedy]()
    if (budget := asked.settled.budget) > 64:
        less = max(64, budget // 4)
        found.append(_Remedy(f"--serve.token_budget {less}", "prompts in more steps", {"token_budget": less}))
    if serve.max_requests > 1:
        less = max(1, serve.max_requests // 4)
        found.append(_Remedy(f"--serve.max_requests {less}", "more wait", {"max_requests": less}))
    if needs.graphs:
        found.append(_Remedy("--serve.fixed_steps False", "slower steps", {"fixed_steps": False}))
    kind = "float8" if asked.model.latent is None else "int8"
    if serve.cache == "stored" and (kind == "int8" or widens_float8(asked.device)):
        found.append(_Remedy(f"--serve.cache {kind}", "rounded", {"cache": kind}))
    for kind in ("int8", "int4"):
        if serve.weights not in (kind, "int4"):
            found.append(_Remedy(f"--serve.weights {kind}", "rounded", {"weights": kind}))
    if asked.model.moe is None:
        found.append(_Remedy(f"--plan.tp {2 * asked.tp}", f"{2 * asked.tp} processes", rest={"tp": 2 * asked.tp}))
    elif (layers := len(experts_of(Transformer(asked.model, device="meta")))) > 2 and asked.resident is None:
        found.append(_Remedy("--experts.resident 2", f"of {layers} layers' experts", rest={"resident": 2}))
    if asked.dtype in (torch.float32, torch.float64):
        found.append(_Remedy("--dtype bfloat16", "other rounding", rest={"dtype": torch.bfloat16}))
    return found
