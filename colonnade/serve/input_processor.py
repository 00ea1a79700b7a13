"""Turns a prompt and its sampling parameters into a :class:`~colonnade.serve.request.Request` that an engine can run.

    prompt -> token ids -> source and target of an encoder–decoder -> limits, grammar, logits processor, adapter

:mod:`colonnade.serve.prompts` has the checks themselves.
"""

import uuid
from collections.abc import Sequence

from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.serve.adapters import EngineAdapters
from colonnade.serve.beam_search import BeamSearch, candidates
from colonnade.serve.grammar import GrammarCompiler
from colonnade.serve.logits_processor import LogitsProcessor
from colonnade.serve.page_pool import PagePool
from colonnade.serve.prompts import (
    Prompt,
    check_no_beams,
    check_no_languages,
    check_params,
    encode_text,
    encoder_input,
    limit_tokens,
    token_ids,
)
from colonnade.serve.request import Request
from colonnade.serve.sampling_params import SamplingParams


class InputProcessor:
    """Makes the requests of one engine, with the ``model``'s configuration and its cache's ``pool``."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        adapters: EngineAdapters,
        pool: PagePool,
    ):
        self.model, self.tokenizer = model, tokenizer
        self.grammars, self.adapters, self.pool = grammars, adapters, pool

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
        resume: Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> Request:
        """The request of :meth:`colonnade.serve.engine.Engine.add`, with a random id and seed if none are given.

        Raises :class:`RequestError` for a prompt that is empty or over the context, and for parameters that this model
        or tokenizer cannot fulfil.
        """
        params, source, encoder = check_params(params), (), self.model.encoder
        ids = encode_text(prompt, self.tokenizer, encoder) if isinstance(prompt, str) else prompt
        allowed = "a single string or list of token ids (generate takes several)"
        ids = token_ids(ids, self.model.vocab_size, "the prompt", allowed)
        if encoder is not None:
            source, ids = encoder_input(ids, params, encoder, self.tokenizer)
        else:
            check_no_languages(params)
            check_no_beams(params)
        search = None if params.beams == 1 else self._beam_search(params, tuple(resume or ()))
        wanted = params.structured_outputs
        matcher = None if wanted is None else self.grammars.matcher(wanted)
        limit = limit_tokens(ids, params, context=self.model.context, vocab_size=self.model.vocab_size, pool=self.pool)
        return Request(
            id=request_id or uuid.uuid4().hex,
            prompt=ids,
            params=params,
            seed=uuid.uuid4().int >> 65 if params.seed is None else params.seed,
            limit_tokens=limit,
            processor=LogitsProcessor.of(ids, params, self.tokenizer, matcher),
            client=client,
            source=source,
            priority=priority,
            adapter=self.adapters.number(adapter),
            resume=None if resume is None else () if search else tuple(resume),
            search=search,
        )

    def _beam_search(self, params: SamplingParams, delivered: tuple[int, ...]) -> BeamSearch:
        """The beam search of a request after another engine has delivered the tokens ``delivered``."""
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.tokenizer.eos_ids)}
        if (needed := candidates(params.beams, len(ends))) > (size := self.model.vocab_size):
            raise RequestError(
                f"{params.beams} beams need {needed} tokens to choose from, and the vocabulary has {size}; "
                f"use at most {size * params.beams // needed}",
                param="beams",
            )
        return BeamSearch(params.beams, params.length_penalty, frozenset(ends), delivered=delivered)
