"""The output items of a response, made from the parts of an answer, and their events."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from kvell.server.api.bodies.completions import Body, Heading, cache_details
from kvell.server.api.bodies.logprobs import LikelyTokens, PendingTokens
from kvell.server.api.schemas.responses import ResponsesRequest
from kvell.server.text.text_model import TextModel
from kvell.server.text.text_stream import Usage

Event = dict[str, Any]
NO_TOKENS = LikelyTokens()
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class OutputWriter:
    """A writer that makes items of one answer's parts; an item ends where the next begins.

    :param answer_id: ids of items contain the part after its dash.
    :param call_ids: ids of calls by index; the list grows while parts arrive.
    :param model: spells the tokens that have log probabilities.
    """

    def __init__(
        self, answer_id: str, call_ids: Sequence[str], model: TextModel | None = None
    ) -> None:
        self._answer = answer_id.partition("-")[2]
        self._call_ids = call_ids
        self._open: _OpenItem | None = None
        self._pending = PendingTokens(model)
        self.items: list[Body] = []

    def write(
        self,
        parts: Sequence[AnswerDelta],
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[Event]:
        """Return the events of the next parts.

        :param logprobs: of the parts' tokens.  The events of a text have those of its tokens;
            those of markers, reasoning and calls are dropped.
        """
        self._pending.append(token_ids, logprobs)
        events = [event for part in parts for event in self._part(part)]
        if parts and not isinstance(parts[-1], Content):
            self._pending.drop_all()
        return events

    def close(self, status: str) -> list[Event]:
        """Return the events that end the answer; its last item has this status.

        An empty answer has an empty message.
        """
        events = []
        if self._open is None:
            events += self._enter("message")
        if self._open is not None and self._open.kind == "message" and self._pending:
            events.append(self._open.add("", self._pending.take_all()))
        return events + self._end(status)

    def _part(self, part: AnswerDelta) -> list[Event]:
        match part:
            case Content(text):
                begun = self._enter("message")
                likely = self._pending.take(text, is_first=bool(begun))
                return [*begun, self._delta(text, likely)]
            case Reasoning(text):
                return [*self._enter("reasoning"), self._delta(text)]
            case ToolCallBegin(index, name):
                call = _OpenCall(self._call_ids[index], name)
                return [*self._end("completed"), *self._begin(call)]
            case ToolCallArguments(_, text):
                return [self._delta(text)]

    def _enter(self, kind: str) -> list[Event]:
        if self._open is not None and self._open.kind == kind:
            return []
        return [*self._end("completed"), *self._begin(_OpenText(kind))]

    def _begin(self, item: "_OpenItem") -> list[Event]:
        item.place = {
            "item_id": f"{_PREFIXES[item.kind]}_{self._answer}{len(self.items)}",
            "output_index": len(self.items),
        }
        self._open = item
        return item.begin()

    def _delta(self, text: str, likely: LikelyTokens = NO_TOKENS) -> Event:
        assert self._open is not None
        return self._open.add(text, likely)

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status)
        self.items.append(events[-1]["item"])
        self._open = None
        return events


class _OpenItem(ABC):
    """An output item that grows.

    :ivar place: id and index of the item, which all its events repeat.
    """

    kind: str

    def __init__(self) -> None:
        self.place: Body = {}
        self._texts: list[str] = []
        self._likely = LikelyTokens()

    def begin(self) -> list[Event]:
        return [self._item_event("added", "in_progress", is_begun=False)]

    def add(self, text: str, likely: LikelyTokens) -> Event:
        self._texts.append(text)
        self._likely.append_tokens_of(likely)
        return self._text_event("delta", {"delta": text}, likely)

    def end(self, status: str) -> list[Event]:
        """Return the events that end the item; the last event has the whole item."""
        return [self._item_event("done", status)]

    def _text(self) -> str:
        self._texts = ["".join(self._texts)]
        return self._texts[0]

    @abstractmethod
    def _text_event(self, step: str, fields: Body, likely: LikelyTokens) -> Event:
        """Return the event of a piece of the item's text, or of all of it."""

    @abstractmethod
    def _item(self, *, is_begun: bool) -> Body:
        """Return the fields of the item that its kind has."""

    def _item_event(self, step: str, status: str, *, is_begun: bool = True) -> Event:
        head = {"id": self.place["item_id"], "type": self.kind, "status": status}
        return {
            "type": f"response.output_item.{step}",
            "output_index": self.place["output_index"],
            "item": head | self._item(is_begun=is_begun),
        }


class _OpenText(_OpenItem):
    """A message or reasoning: an item with one text part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def begin(self) -> list[Event]:
        return [*super().begin(), self._part_event("added")]

    def end(self, status: str) -> list[Event]:
        done = self._text_event("done", {"text": self._text()}, self._likely)
        return [done, self._part_event("done"), *super().end(status)]

    def _item(self, *, is_begun: bool) -> Body:
        content = [self._content()] if is_begun else []
        if self.kind == "message":
            return {"role": "assistant", "content": content}
        return {"summary": [], "content": content, "encrypted_content": None}

    def _content(self) -> Body:
        if self.kind == "message":
            fields = {"annotations": [], "logprobs": self._likely.to_list()}
            return {"type": "output_text", "text": self._text(), **fields}
        return {"type": "reasoning_text", "text": self._text()}

    def _part_event(self, step: str) -> Event:
        kind = f"response.content_part.{step}"
        return {"type": kind, **self.place, "content_index": 0, "part": self._content()}

    def _text_event(self, step: str, fields: Body, likely: LikelyTokens) -> Event:
        name = "output_text" if self.kind == "message" else "reasoning_text"
        if self.kind == "message":
            fields = fields | {"logprobs": likely.to_list()}
        return {"type": f"response.{name}.{step}", **self.place, "content_index": 0, **fields}


class _OpenCall(_OpenItem):
    kind = "function_call"

    def __init__(self, call_id: str, name: str) -> None:
        super().__init__()
        self._call_id, self._name = call_id, name

    def end(self, status: str) -> list[Event]:
        fields = {"name": self._name, "arguments": self._text()}
        return [self._text_event("done", fields, NO_TOKENS), *super().end(status)]

    def _item(self, *, is_begun: bool) -> Body:
        return {"call_id": self._call_id, "name": self._name, "arguments": self._text()}

    def _text_event(self, step: str, fields: Body, likely: LikelyTokens) -> Event:
        return {"type": f"response.function_call_arguments.{step}", **self.place, **fields}


_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "user",
)


def response_body(
    heading: Heading,
    request: ResponsesRequest,
    tools: Sequence[Mapping[str, Any]],
    status: str,
    /,
    **more: Any,
) -> Body:
    """Return a response: fields of the request, and the answer so far.

    :param request: has the temperature and ``top_p`` that the answer is sampled with.
    :param tools: checked, in the format of chat completions.
    :param more: the output and other fields that are already known.
    """
    begun: Body = {"output": [], "usage": None, "error": None, "incomplete_details": None}
    return {
        "id": heading.answer_id,
        "object": "response",
        "created_at": heading.created,
        "status": status,
        "background": False,
        "model": heading.model,
        "previous_response_id": None,
        **{name: getattr(request, name) for name in _ECHOED},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.temperature,
        "text": _text_body(request),
        "tool_choice": request.tool_choice or "auto",
        "tools": [_tool_body(tool["function"]) for tool in tools],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        **begun,
        **more,
    }


def response_usage(usage: Usage, reasoning_tokens: int) -> Body:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": cache_details(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": min(reasoning_tokens, usage.completion_tokens)
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _text_body(request: ResponsesRequest) -> Body:
    text = request.text
    if text is None or text.format is None:
        form: Body = {"type": "text"}
    elif text.format.type == "json_schema":
        form = text.format.model_dump(by_alias=True)
    else:
        form = {"type": text.format.type}
    return {"format": form, "verbosity": (text and text.verbosity) or "medium"}


def _tool_body(function: Mapping[str, Any]) -> Body:
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: function.get(name) for name in fields}}
