"""Tool calls in a model's own notation: the grammar that the output follows, and the parser of the output.

    hermes    <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number, after any text    (Qwen, Hermes)
    llama3    {"name": "f", "parameters": {...}}; {...}                  only at the start of the output
    mistral   [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]     after any text

With ``tool_choice`` "auto" the output is free until a call begins, and from there on constrained to the tools and their
schemas; with "required", or a named function, it is constrained from the start, so any model obeys.
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from colonnade.config.serve import ToolFormatName
from colonnade.serve.structured_outputs import WHITESPACE, lark_json

if TYPE_CHECKING:
    from colonnade.data.tokenizer import Tokenizer


class ToolFormat(NamedTuple):
    """How a model writes calls."""

    name: ToolFormatName
    begin: str
    """The text before a call, or before the list of calls; empty if an output with calls has no other text."""
    end: str
    """The text after a call."""
    arguments: str
    """The key of the arguments."""


FORMATS: dict[ToolFormatName, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments"),
    "llama3": ToolFormat("llama3", "", "", "parameters"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments"),
}


def detect_tool_format(template: str | None) -> ToolFormatName | None:
    """The format of a chat template's calls; None if it has none."""
    if template is None or "tools" not in template:
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3" if '"parameters"' in template or "<|python_tag|>" in template else None


class ToolNotation(NamedTuple):
    """How the served model writes calls."""

    format: ToolFormat
    in_template: bool
    """Whether its chat template shows the tools to the model."""
    special_ids: Mapping[str, int]
    """Ids of those texts of the format that are special tokens."""

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "ToolNotation":
        """The inverse of :meth:`to_dict`."""
        return ToolNotation(FORMATS[values["format"]], values["in_template"], values["special_ids"])

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {**self._asdict(), "format": self.format.name}

    @staticmethod
    def of(tokenizer: "Tokenizer", name: ToolFormatName | None = None) -> "ToolNotation":
        """The notation called ``name``; by default that of the chat template, or hermes if it has none."""
        detected = detect_tool_format(tokenizer.chat_template)
        tool_format = FORMATS[name or detected or "hermes"]
        ids = {text: tokenizer.token_id(text) for text in (tool_format.begin, tool_format.end) if text}
        special = {text: token for text, token in ids.items() if token is not None and token in tokenizer.special_ids}
        return ToolNotation(tool_format, name is not None or detected is not None, special)


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The calls that an output may contain, and their notation."""

    notation: ToolNotation
    tools: Sequence[Mapping[str, Any]]
    """OpenAI's objects: {"type": "function", "function": {"name", "parameters"}}."""
    required: bool = False
    """Whether the output is one call or several."""
    parallel: bool = True
    """Whether there may be several calls."""

    @property
    def format(self) -> ToolFormat:
        """The notation's."""
        return self.notation.format

    def grammar(self) -> str:
        """The grammar of the output, in llguidance's dialect of Lark."""
        lines = ["%llguidance {}", r"TEXT: /(.|\n)*/", r"space: /[ \n]{0,4}/", *self._calls()]
        begin = self._terminal(self.format.begin)
        match self.format.name:
            case "llama3":
                calls = 'call (";" space call)*' if self.parallel else "call"
                lines += [r"ANSWER: /([^{](.|\n)*)?/", f"start: {calls}" + ("" if self.required else " | ANSWER")]
            case "mistral":
                more = '("," space call)*' if self.parallel else ""
                lines.append(f'rest: space "[" call {more} "]"')
                lines.append(f"start: {begin} rest" if self.required else "start: open rest | TEXT")
            case "hermes":
                lines.append(f"rest: space call space {self._terminal(self.format.end)}")
                if self.required:
                    more = f"(space {begin} rest)*" if self.parallel else ""
                    lines.append(f"start: {begin} rest {more}")
                else:
                    lines.append("start: (open rest)* TEXT" if self.parallel else "start: open rest | TEXT")
        if not self.required and self.format.begin:
            # A beginning that is text ends the free text as soon as it is complete: the lexeme is lazy.
            lazy = "" if self.format.begin in self.notation.special_ids else "[lazy]"
            lines.append(f"open{lazy}: TEXT {begin}")
        return "\n".join(lines)

    def _calls(self) -> list[str]:
        """Rules for one call: of each tool in the spelling that models are trained on, with the tool's own schema."""
        names = [f"call_{i}" for i in range(len(self.tools))]
        rules = [f"call: {' | '.join(names)}"]
        for rule, tool in zip(names, self.tools, strict=True):
            function = tool["function"]
            schema = {"type": "object", **(function.get("parameters") or {})}
            head = f'{{"name": {json.dumps(function["name"])}, "{self.format.arguments}": '
            rules.append(f'{rule}: {json.dumps(head)} {rule}_arguments "}}"')
            spaced = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
            rules.append(f"{rule}_arguments: %json {lark_json(spaced)}")
        return rules

    def _terminal(self, text: str) -> str:
        token = self.notation.special_ids.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


class ToolCallDelta(NamedTuple):
    """A piece of a call: its beginning, with id and name, or more of its arguments."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass
class ParsedText:
    """The parsed content of new output text."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


_NAME = re.compile(
    r'[\s\[,;]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_CLOSE = re.compile(r"\s*\}")


class ToolCallParser:
    """Splits an output that follows :meth:`ToolOptions.grammar` into text and calls, as it arrives."""

    def __init__(self, tool_format: ToolFormat):
        self._format = tool_format
        self._buffer, self._depth, self._in_string, self._escaped = "", 0, False, False
        self._state: Literal["start", "text", "name", "arguments", "close", "after"] = "start"
        self.calls = 0
        """Calls that have begun."""

    @property
    def in_arguments(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self._state == "arguments"

    def push(self, text: str) -> ParsedText:
        """The content that is certain after ``text``."""
        self._buffer += text
        parsed = ParsedText()
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> ParsedText:
        """The rest, once no text follows; an incomplete beginning of a call is dropped."""
        rest = self._buffer if self._state in ("start", "text") else ""
        self._buffer = ""
        return ParsedText("" if self.calls and rest.isspace() else rest)

    def _advance(self, parsed: ParsedText) -> bool:
        """Consume some of the buffer; False if more text is needed."""
        match self._state:
            case "start":
                return self._start()
            case "text":
                return self._text(parsed)
            case "name":
                return self._name(parsed)
            case "arguments":
                return self._arguments(parsed)
            case "close":
                return self._skip(_CLOSE.match(self._buffer), "after")
            case "after":
                return self._after()

    def _start(self) -> bool:
        """Without a marker that begins calls, the first character of the output decides."""
        if not self._format.begin:
            if not self._buffer:
                return False
            self._state = "name" if self._buffer[0] == "{" else "text"
        else:
            self._state = "text"
        return True

    def _text(self, parsed: ParsedText) -> bool:
        begin, buffer = self._format.begin, self._buffer
        if begin and (at := buffer.find(begin)) >= 0:
            parsed.content += buffer[:at].rstrip()
            self._buffer, self._state = buffer[at + len(begin) :], "name"
            return True
        # A possible beginning of a call is held back, with the space before it.
        held = next((n for n in range(min(len(begin), len(buffer)), 0, -1) if begin.startswith(buffer[-n:])), 0)
        certain = len(buffer[: len(buffer) - held].rstrip()) if begin else len(buffer)
        parsed.content += buffer[:certain]
        self._buffer = buffer[certain:]
        return False

    def _name(self, parsed: ParsedText) -> bool:
        found = _NAME.match(self._buffer)
        if found is None:
            return False
        parsed.calls.append(ToolCallDelta(self.calls, "", self._new_id(), json.loads(found[1])))
        self.calls += 1
        return self._skip(found, "arguments")

    def _arguments(self, parsed: ParsedText) -> bool:
        """Pass the arguments, an object, through; it ends where its braces are balanced."""
        end = 0
        for character in self._buffer:
            end += 1
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._state = "close"
                    break
        if end:
            parsed.calls.append(ToolCallDelta(self.calls - 1, self._buffer[:end]))
        self._buffer = self._buffer[end:]
        return self._state == "close"

    def _after(self) -> bool:
        """After a call: another one, or text."""
        rest = self._buffer.lstrip()
        if self._format.end:
            if not rest.startswith(self._format.end):
                return False
            self._buffer, self._state = rest[len(self._format.end) :], "text"
            return True
        if not rest:
            return False
        if rest[0] in ",;":
            self._state = "name"
        else:
            self._buffer, self._state = rest.removeprefix("]"), "text"
        return True

    def _skip(self, found: re.Match[str] | None, state: Literal["arguments", "after"]) -> bool:
        if found is None:
            return False
        self._buffer, self._state = self._buffer[found.end() :], state
        return True

    def _new_id(self) -> str:
        """Mistral's templates accept only ids of nine characters."""
        key = uuid.uuid4().hex
        return key[:9] if self._format.name == "mistral" else f"call_{key[:24]}"
