"""The remainder of a request after its engine has failed, so that another engine can continue after its last token.

The seed is fixed before the request runs. Noise is a function of the seed and the number of tokens, so the text equals
that of an engine that did not fail; in 16 bits the logits of another batch may round differently.
"""

import time
import uuid
from dataclasses import replace

from colonnade.serve.generation_request import GenerationRequest
from colonnade.serve.pooling_request import PoolingOutput, PoolingRequest
from colonnade.serve.request import Output


class Progress:
    """A request, and the outputs that have been delivered."""

    def __init__(self, request: GenerationRequest | PoolingRequest):
        if isinstance(request, GenerationRequest) and request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=uuid.uuid4().int >> 65))
        self.request = request
        """The original request, with a seed."""
        self._deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        self._tokens: list[list[int]] = [[] for _ in range(request.num_completions)]
        self._ended = set[int]()

    @property
    def remaining_s(self) -> float | None:
        """Time until the request times out; None: it does not [s]."""
        return None if self._deadline_s is None else max(0.001, self._deadline_s - time.monotonic())

    def observe(self, index: int, output: Output | PoolingOutput) -> bool:
        """Record an output; False for one after the last of its completion."""
        if index in self._ended:
            return False
        if output.finish_reason:
            self._ended.add(index)
        if isinstance(output, Output) and output.token is not None:
            self._tokens[index].append(output.token)
        return True

    def remaining_request(self) -> GenerationRequest | PoolingRequest:
        """The request for another engine. Texts to be pooled are sent again."""
        if isinstance(self.request, PoolingRequest):
            return replace(self.request, timeout_s=self.remaining_s)
        resume = [None if i in self._ended else tokens for i, tokens in enumerate(self._tokens)]
        return replace(self.request, timeout_s=self.remaining_s, resume=resume)
