"""The bodies of requests for embeddings, classes, scores and rankings: OpenAI's, vLLM's, Jina's and Cohere's.

An unknown parameter is refused, with the closest known one, as for generation.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, WithJsonSchema, field_validator, model_validator

from colonnade.errors import RequestError
from colonnade.serve.api.errors import format_value
from colonnade.serve.api.parameters import are_ids, known_parameters
from colonnade.serve.api.request_schemas import PROMPT
from colonnade.serve.pooling_request import PoolingRequest, Text

MAX_TEXTS = 2048
"""Maximum number of texts in one request: OpenAI's limit."""

TEXTS: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}


class PoolingBody(BaseModel):
    """The fields of all endpoints. None, also an explicit null, means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ("user",)
    """Parameters that are accepted and change nothing."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return known_parameters(values, cls.model_fields, cls.ignored)

    def truncation(self, context: int) -> int | None:
        """``truncate_prompt_tokens``, where -1 is the model's ``context``; raises :class:`RequestError` for others."""
        most = self.truncate_prompt_tokens
        if most is None or 1 <= most <= context:
            return most
        if most == -1:
            return context
        raise RequestError(
            f"truncate_prompt_tokens is {most}; it must be from 1 to the model's context of {context}, or -1 for the "
            "context",
            param="truncate_prompt_tokens",
        )


class InputBody(PoolingBody):
    """A body with texts in ``input``."""

    input: Annotated[Any, WithJsonSchema(PROMPT)]
    add_special_tokens: bool | None = None

    @field_validator("input")
    @classmethod
    def _text_or_tokens(cls, value: object) -> object:
        items = value if isinstance(value, list) else [value]
        if value == []:
            raise RequestError("input is an empty list; send at least one text", param="input")
        if all(isinstance(item, str) for item in items) or are_ids(value) or all(map(are_ids, items)):
            return value
        raise RequestError("input must be a string, a list of token ids, or a list of either", param="input")

    def to_request(self, context: int, dimensions: int | None = None) -> PoolingRequest:
        """One result for each text of ``input``."""
        several = isinstance(self.input, list) and not are_ids(self.input)
        texts: list[Text] = self.input if several else [self.input]
        _check_count(len(texts), "input")
        return PoolingRequest(
            texts,
            [("input", len(texts) if several else 0)],
            self.truncation(context),
            add_special_tokens=self.add_special_tokens is not False,
            dimensions=dimensions,
        )


class EmbeddingBody(InputBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def checked_dimensions(self, width: int) -> int | None:
        """``dimensions``; raises :class:`RequestError` if the model's embeddings, ``width`` wide, have fewer."""
        if self.dimensions is not None and not 1 <= self.dimensions <= width:
            raise RequestError(
                f"dimensions is {self.dimensions}, but the model's embeddings have {width}; ask for 1 to {width}",
                param="dimensions",
            )
        return self.dimensions


class ClassifyBody(InputBody):
    """POST /classify."""


class PairsBody(PoolingBody):
    """A body that has pairs of texts."""

    def pairs(self) -> tuple[list[str], list[str], list[tuple[str, int]]]:
        """First texts (one for all pairs, or one for each), second texts, and the fields that hold both."""
        raise NotImplementedError


class ScoreBody(PairsBody):
    """POST /v1/score."""

    text_1: Annotated[Any, WithJsonSchema(TEXTS)]
    text_2: Annotated[Any, WithJsonSchema(TEXTS)]

    @field_validator("text_1", "text_2")
    @classmethod
    def _texts(cls, value: object, info: Any) -> object:
        if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(x, str) for x in value)):
            return value
        problem = "is an empty list; send at least one text" if value == [] else "must be a string, or a list of them"
        raise RequestError(f"{info.field_name} {problem}", param=info.field_name)

    def pairs(self) -> tuple[list[str], list[str], list[tuple[str, int]]]:
        """One text with one, one with each of many, or two lists of equal length."""
        first, second = (x if isinstance(x, list) else [x] for x in (self.text_1, self.text_2))
        counts = [len(x) if isinstance(x, list) else 0 for x in (self.text_1, self.text_2)]
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}; send one text_1, or as many as text_2 "
                "has",
                param="text_1",
            )
        _check_count(len(second), "text_2")
        return first, second, [("text_1", counts[0]), ("text_2", counts[1])]


class RerankBody(PairsBody):
    """POST /v1/rerank, /v2/rerank and /rerank."""

    query: str
    documents: Annotated[list[str], WithJsonSchema({"type": "array", "minItems": 1, "items": {"anyOf": [
        {"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"],
        "additionalProperties": False}]}})]  # fmt: skip
    top_n: int | None = None
    return_documents: bool | None = None

    @field_validator("documents", mode="before")
    @classmethod
    def _documents(cls, value: object) -> object:
        if not isinstance(value, list) or not value:
            problem = "is an empty list; send at least one document" if value == [] else "must be a list of texts"
            raise RequestError(f"documents {problem}", param="documents")
        texts = [x["text"] if isinstance(x, dict) and set(x) == {"text"} else x for x in value]
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                what = f"documents.{index} is {format_value(text)}; it must be a string, or an object with a text"
                raise RequestError(what, param="documents")
        return texts

    @field_validator("top_n")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise RequestError(f"top_n is {value}; it must be 1 or more", param="top_n")
        return value

    def pairs(self) -> tuple[list[str], list[str], list[tuple[str, int]]]:
        """The query with each document."""
        _check_count(len(self.documents), "documents")
        return [self.query], self.documents, [("query", 0), ("documents", len(self.documents))]


def _check_count(count: int, field: str) -> None:
    if count > MAX_TEXTS:
        raise RequestError(
            f"{field} has {count} texts; at most {MAX_TEXTS} per request; send the rest in another",
            param=field,
            code="too_many_prompts",
        )
