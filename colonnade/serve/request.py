"""A request: its state while it runs, and the outputs and statistics that an engine returns.

    ids = prompt + output          ids[:computed] are in the cache, ids[computed:] are still to be run

A decode step is the special case of one token left to run. With ``async_scheduling`` a step is launched before the
last one's tokens have reached the host: the request's next token is then unknown here, and is filled in on the device.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple

from colonnade.errors import RequestError
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.speculation import Drafter

if TYPE_CHECKING:
    from colonnade.serve.beam_search import BeamSearch
    from colonnade.serve.logits_processor import LogitsProcessor

FinishReason = Literal["stop", "length", "error", "grammar_error", "displaced", "diverged"]
"""stop: an end token, a stop string, or the end of the grammar. length: max_tokens or the context. error: the logits
were not finite. grammar_error: the grammar needs more work for a token than is allowed. displaced: it lost its place in
a full queue to another client. diverged: a resumed beam search found a different text from the one delivered."""


class Status(Enum):
    """Where a request is in its life cycle."""

    WAITING = "waiting"
    """In the queue, without pages: not admitted yet, or preempted."""
    RUNNING = "running"
    """Has pages for all its tokens and takes part in the steps."""
    FINISHED = "finished"
    """Complete or cancelled; has no pages."""


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """The state of one generation for the scheduler and the sampler; text is :mod:`colonnade.serve.text_stream`'s."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """params.seed, or a random one."""
    limit_tokens: int
    """Tokens to generate, at most."""
    processor: "LogitsProcessor | None" = None
    """Changes the logits; None samples them unchanged."""
    client: str = ""
    """The client that sent it; clients are admitted in turn (:mod:`colonnade.serve.fair_queue`)."""
    priority: int = 0
    """Its class in the queue; lower ones first."""
    adapter: int = 0
    """The number of its adapter (:mod:`colonnade.serve.adapters`); 0: none."""
    source: tuple[int, ...] = ()
    """The input of an encoder–decoder's encoder; ``prompt`` is then the beginning of the target."""
    source_pages: list[int] = field(default_factory=list)
    """The pages with the keys and values of cross attention to the source, shared by requests with the same source."""
    encode_source: bool = False
    """Whether its next slice encodes the source."""
    source_hash: bytes = b""
    """The hash of the whole source and of what encodes it."""
    search: "BeamSearch | None" = None
    """The beam search that it is a beam of; None: it samples one text."""
    held: bool = False
    """Whether it waits for the other beams of its search."""
    resume: tuple[int, ...] | None = None
    """Output ids that another engine has generated and delivered; None for a new request. A beam search begins again
    and compares its text with them (``search.delivered``), so that they are empty here."""
    ids: list[int] = field(init=False)
    pages: list[int] = field(default_factory=list)
    """The page table: token i is in pages[i // page_tokens]."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full pages of ``ids``, as far as they were needed (:mod:`colonnade.serve.page_pool`)."""
    cached_pages: int = 0
    """Leading pages with hashes that are in the pool."""
    cached_tokens: int | None = None
    """Tokens of the prompt that the prefix cache had when the request was first admitted; None before."""
    computed: int = 0
    """Tokens in the cache once the scheduled work has run."""
    scored: int = 0
    """Leading tokens of the prompt whose successors' log-probabilities have been scheduled."""
    in_flight: int = 0
    """Tokens that scheduled work samples, but that are not committed yet."""
    sample_index: int = 0
    """Which of the tokens that the last work sampled is this request's."""
    batch_row: int = -1
    """Its row in a padded decode batch (:class:`~colonnade.serve.batch_rows.BatchRows`); negative for none."""
    status: Status = Status.WAITING
    admitted_s: float | None = None
    """When its first pass was launched (time.monotonic)."""
    drafter: Drafter | None = None
    """Set by the scheduler; None for no speculative decoding."""
    draft_computed: int = 0
    """Tokens in the cache of the draft model, if there is one."""

    def __post_init__(self):
        self.ids = [*self.prompt, *(self.resume or ())]
        if self.source:
            key = array("q", (self.adapter, *self.source))
            self.source_hash = blake2b(key.tobytes(), digest_size=16).digest()
        if self.resume:  # the first output, with the prompt's log-probabilities, has been delivered
            self.scored = len(self.prompt) - 1

    @property
    def is_continuation(self) -> bool:
        """Whether another engine has delivered tokens of it."""
        return bool(self.resume) or (self.search is not None and bool(self.search.delivered))

    def exchange(self, other: "Request") -> None:
        """Exchange tokens and pages with ``other``, a beam of the same search."""
        for name in ("ids", "pages", "page_hashes", "cached_pages", "computed"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    @property
    def width(self) -> int:
        """Requests that it may become: the beams of a search."""
        return 1 if self.search is None else self.search.width

    @property
    def input_tokens(self) -> int:
        """Tokens from the client: the source, or the prompt."""
        return len(self.source or self.prompt)

    @property
    def prefix_hash_seed(self) -> bytes:
        """What the keys of the first page depend on besides its tokens: the source, or the adapter."""
        return self.source_hash or (self.adapter.to_bytes(4, "big") if self.adapter else b"")

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - len(self.prompt)

    @property
    def unscored(self) -> bool:
        """True while log-probabilities of the prompt are still to be scheduled."""
        return self.params.prompt_logprobs is not None and self.scored < len(self.prompt) - 1

    @property
    def pending(self) -> int:
        """Tokens that are not in the cache yet."""
        return self.length - self.computed

    @property
    def length(self) -> int:
        """Tokens so far, including those in flight."""
        return len(self.ids) + self.in_flight

    @property
    def decodes(self) -> bool:
        """True if the next step can run its newest token."""
        length = len(self.ids) + self.in_flight
        ends = length - len(self.prompt) >= self.limit_tokens
        return length - self.computed == 1 and not ends and not self.needs_commit and not self.held

    @property
    def needs_commit(self) -> bool:
        """True if its next token cannot be sampled before those in flight are known."""
        if not self.in_flight:
            return False
        return self.needs_history or self.search is not None or (self.drafter is not None and self.drafter.active)

    @property
    def needs_history(self) -> bool:
        """True if the changes of its logits depend on the tokens before."""
        return self.processor is not None and self.processor.needs_history

    @property
    def complete(self) -> bool:
        """True when its last token has been scheduled."""
        return self.generated + self.in_flight >= self.limit_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a finished request waited, prefilled and decoded [s]."""

    queue_s: float
    """From arrival to the first step that ran any of its tokens."""
    prefill_s: float
    """From that step to its first token."""
    decode_s: float
    """From the first token to the last."""


class Alternative(NamedTuple):
    """A token that was among the most probable ones."""

    token: int
    data: bytes
    """Its bytes; they may be part of a character."""
    logprob: float


class TokenLogprob(NamedTuple):
    """The log-probability of a token, from the raw logits."""

    token: int
    data: bytes
    """Its bytes; they may be part of a character."""
    logprob: float | None
    """None for the first token of a prompt."""
    offset: int
    """Characters of the text before it; 0 for a prompt that is not echoed."""
    top: tuple[Alternative, ...]
    """The most probable tokens in its place, in descending order; the first is the argmax of the logits."""

    @property
    def greedy(self) -> bool:
        """Whether it is the argmax; needs at least one alternative."""
        return bool(self.top) and self.top[0].token == self.token


class Output(NamedTuple):
    """One new token of a request, and the text that it completes."""

    id: str
    text: str
    """New text; may be empty while a character or a possible stop string is incomplete."""
    token: int | None
    """None if the request generates none (``max_tokens`` is 0)."""
    finish_reason: FinishReason | None
    """None unless this is the last output."""
    prompt_tokens: int
    generated_tokens: int
    """Tokens so far, including an end token."""
    timing: Timing | None = None
    """Set in the last output."""
    logprobs: TokenLogprob | None = None
    """The token's, if asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """The prompt's, in the first output, if requested."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt's, in the first output, if requested."""
    version: int = 0
    """Of the weights (:meth:`colonnade.serve.engine.Engine.update_weights`)."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The complete output of a request."""

    text: str
    token_ids: tuple[int, ...]
    """All generated tokens, including an end token or those of a stop string, which the text omits."""
    finish_reason: FinishReason
    prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each of ``token_ids``, if asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each token of the prompt, if requested."""

    @staticmethod
    def of(outputs: Iterable[Output]) -> "Completion":
        """Join all outputs of one request; raises :class:`RequestError` if it ended with an error."""
        outputs = list(outputs)
        reason = outputs[-1].finish_reason
        assert reason is not None, "the request has not finished"
        if error := failure(reason):
            raise error
        text = "".join(output.text for output in outputs)
        tokens = tuple(output.token for output in outputs if output.token is not None)
        logprobs = tuple(output.logprobs for output in outputs if output.logprobs is not None)
        prompt = outputs[0].prompt_logprobs
        return Completion(text, tokens, reason, outputs[-1].prompt_tokens, logprobs or None, prompt)


def failure(reason: FinishReason | None) -> RequestError | None:
    """The error of a request that ended for ``reason``, if it failed."""
    if reason == "grammar_error":
        return RequestError(
            "the grammar is too complex: the next token exceeds the work limit; simplify structured_outputs",
            param="structured_outputs",
            code="grammar_too_complex",
        )
    if reason == "displaced":
        return RequestError(
            "the queue is full, and most of it belongs to this client: its newest request was dropped in favour of "
            "another client's; try again later",
            status=429,
            code="queue_full",
        )
    if reason == "diverged":
        return RequestError(
            "the engine failed after sending part of this text, and the beam search resumed on another engine found "
            "a different text; send the request again",
            status=503,
            code="search_diverged",
        )
    if reason != "error":
        return None
    return RequestError(
        "the model's logits were not finite (overflow in its dtype, or damaged weights)",
        status=500,
        code="not_finite",
        operator_hint="try --dtype float32",
    )


@dataclass
class Stats:
    """An engine's counters since its start, and its state after the last step; shown as Prometheus metrics."""

    running: int = 0
    """Requests with pages."""
    waiting: int = 0
    """Requests in the queue."""
    pages_used: int = 0
    pages: int = 0
    """Pages in the pool."""
    steps: int = 0
    """Forward passes."""
    preemptions: int = 0
    """Requests that were evicted from the cache and recomputed later."""
    prefix_queries: int = 0
    """Tokens of admitted requests that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Tokens of these that were found, and not computed again."""
    shared_keys: int = 0
    """Keys of a layer that decode steps read once for several requests, summed over the steps."""
    spared_keys: int = 0
    """Key reads saved by that: each shared key times the requests that share it, minus one."""
    prompt_tokens: int = 0
    """Tokens of the prompts that were run, each prompt counted once."""
    generation_tokens: int = 0
    """Tokens sampled."""
    drafts: int = 0
    """Times that tokens were drafted for a request."""
    draft_tokens: int = 0
    """Tokens drafted, and checked by a forward pass."""
    accepted_draft_tokens: int = 0
    """Drafted tokens that were generated."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""

    @property
    def cache_usage(self) -> float:
        """Used share of the pages, 0 to 1."""
        return self.pages_used / self.pages if self.pages else 0.0
