"""The content blocks of an answer of ``/v1/messages``, and their events."""

import hashlib
import json
from collections.abc import Sequence

import msgspec
from pydantic import TypeAdapter

from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from kvell.server.api.bodies.completions import Body

_INPUT: TypeAdapter[dict[str, object]] = TypeAdapter(dict[str, object])


class BlockWriter:
    """A writer that makes blocks of one answer's parts; a block ends where the next begins.

    :param call_ids: ids of calls by index; the list grows while parts arrive.
    """

    def __init__(self, call_ids: Sequence[str], *, omits_thinking: bool) -> None:
        self._call_ids, self._omits_thinking = call_ids, omits_thinking
        self._begun: Body | None = None
        self._texts: list[str] = []
        self.blocks: list[Body] = []

    def close(self) -> list[Body]:
        """Return the events that end the answer; an empty answer has an empty text block."""
        begun = [] if self._begun or self.blocks else self._enter("text")
        return [*begun, *self._end()]

    def part_events(self, part: AnswerDelta) -> list[Body]:
        match part:
            case Content(text):
                return [*self._enter("text"), self._delta("text_delta", "text", text)]
            case Reasoning(text):
                begun = self._enter("thinking")
                if self._omits_thinking:
                    self._texts.append(text)
                    return begun
                return [*begun, self._delta("thinking_delta", "thinking", text)]
            case ToolCallBegin(index, name):
                ended = self._end()
                call_id = tool_use_id(self._call_ids[index])
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                return [*ended, self._begin(block)]
            case ToolCallArguments(_, text):
                return [self._delta("input_json_delta", "partial_json", text)]

    def _enter(self, kind: str) -> list[Body]:
        if self._begun is not None and self._begun["type"] == kind:
            return []
        more = {"signature": ""} if kind == "thinking" else {"citations": None}
        return [*self._end(), self._begin({"type": kind, kind: "", **more})]

    def _begin(self, block: Body) -> Body:
        self._begun = block
        return self._event("start", content_block=block)

    def _delta(self, kind: str, field: str, text: str) -> Body:
        self._texts.append(text)
        return self._event("delta", delta={"type": kind, field: text})

    def _end(self) -> list[Body]:
        block = self._begun
        text = "".join(self._texts)
        if block is None:
            return []
        events = []
        match block["type"]:
            case "thinking":
                signature = hashlib.sha256(text.encode(errors="replace")).hexdigest()
                sign = {"type": "signature_delta", "signature": signature}
                events.append(self._event("delta", delta=sign))
                shown = "" if self._omits_thinking else text
                block = block | {"thinking": shown, "signature": signature}
            case "tool_use":
                block = block | {"input": tool_input(text)}
            case _:
                block = block | {"text": text}
        events.append(self._event("stop"))
        self.blocks.append(block)
        self._begun = None
        self._texts = []
        return events

    def _event(self, step: str, **fields: Body) -> Body:
        return {"type": f"content_block_{step}", "index": len(self.blocks), **fields}


def tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


def tool_input(arguments: str) -> msgspec.Raw:
    """Return the input of a call: its arguments, or the readable part if they are incomplete."""
    try:
        value = _INPUT.validate_json(arguments or "{}", experimental_allow_partial=True)
        written = json.dumps(value, allow_nan=False)
    except ValueError:
        written = "{}"
    return msgspec.Raw(written.encode())
