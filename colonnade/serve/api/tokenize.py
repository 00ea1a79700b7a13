"""vLLM's POST /tokenize and /detokenize, GET /tokenizer_info and /version. The engine process has the tokenizer."""

import importlib.metadata
from typing import Self

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import to_json

from colonnade.errors import RequestError
from colonnade.serve.api import openapi, replies
from colonnade.serve.api.chat_schemas import ChatMessage
from colonnade.serve.api.pooling_routes import FindModel


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's begin and end tokens, as /v1/completions does; the default for a prompt. The chat
    template writes those of ``messages``."""
    add_generation_prompt: bool | None = None
    """Whether the beginning of a reply follows the messages; true by default."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        if self.messages is not None and not self.messages:
            raise RequestError("messages is empty; send at least one", param="messages")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError(
                "the chat template adds the special tokens of messages; remove add_special_tokens",
                param="add_special_tokens",
            )
        if self.prompt is not None and self.add_generation_prompt is not None:
            raise RequestError("add_generation_prompt is only for messages; remove it", param="add_generation_prompt")
        return self


class TokenizeReply(replies.Reply):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The vocabulary's spellings, such as ``Ġthe``."""


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: list[int]


class DetokenizeReply(replies.Reply):
    """POST /detokenize."""

    prompt: str


class TokenizerInfo(replies.Reply, total=False):
    """GET /tokenizer_info: the contents of ``tokenizer_config.json``."""

    tokenizer_class: str
    clean_up_tokenization_spaces: bool
    bos_token: str
    eos_token: str
    unk_token: str
    sep_token: str
    pad_token: str
    cls_token: str
    mask_token: str
    chat_template: str


class Version(replies.Reply):
    """GET /version."""

    version: str


def install_tokenize(app: FastAPI, find_model: FindModel) -> None:
    """Add the routes to ``app``; ``find_model`` returns the model of a request with this ``model``."""

    @app.post("/tokenize", responses={200: {"model": TokenizeReply}, **openapi.refusals()})
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """The token ids of a prompt, or of the messages of a chat."""
        engine = find_model(body.model, request).engine
        messages = body.messages and [message.for_template() for message in body.messages]
        answer = await engine.ask(
            "tokenize",
            prompt=body.prompt,
            messages=messages,
            special=body.add_special_tokens is not False,
            generation_prompt=body.add_generation_prompt is not False,
            strings=bool(body.return_token_strs),
        )
        tokens = answer["tokens"]
        reply: TokenizeReply = {
            "count": len(tokens), "max_model_len": engine.max_request_tokens, "tokens": tokens,
            "token_strs": answer["strings"],
        }  # fmt: skip
        return Response(to_json(reply), media_type="application/json")

    @app.post("/detokenize", responses={200: {"model": DetokenizeReply}, **openapi.refusals()})
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """The text of token ids."""
        engine = find_model(body.model, request).engine
        answer = await engine.ask("detokenize", tokens=body.tokens)
        reply: DetokenizeReply = {"prompt": answer["text"]}
        return Response(to_json(reply), media_type="application/json")

    @app.get("/tokenizer_info", responses={200: {"model": TokenizerInfo}, **openapi.refusals()})
    async def tokenizer_info(request: Request, model: str | None = None) -> Response:
        """The tokenizer's class, special tokens and chat template, which clients such as lm-eval read."""
        answer = await find_model(model, request).engine.ask("tokenizer_info")
        return Response(to_json(answer["info"]), media_type="application/json")

    @app.get("/version", responses=openapi.refusals("4XX"))
    async def version() -> Version:
        """Colonnade's version."""
        return {"version": importlib.metadata.version("colonnade")}
