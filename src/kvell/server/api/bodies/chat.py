"""Bodies of chat completions."""

from collections.abc import Sequence
from typing import Any

from kvell.server.answers.deltas import (
    AnswerDelta,
    Content,
    ParsedAnswer,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
)
from kvell.server.api.bodies.completions import Body, Heading, so_far, usage_body
from kvell.server.text.text_stream import TextDelta, Usage

CHUNK = "chat.completion.chunk"


def chat_body(
    heading: Heading, choices: Sequence[Body], total: Usage, reasoning_tokens: int
) -> Body:
    """Return a whole chat completion; the log probabilities of its prompt are also where vLLM's
    answers have them."""
    scores = choices[0].get("prompt_logprobs") if choices else None
    more = {} if scores is None else {"prompt_logprobs": scores}
    usage = usage_body(total, reasoning_tokens)
    return heading.body("chat.completion", choices, usage=usage, **more)


def message_body(answer: ParsedAnswer, call_ids: Sequence[str]) -> Body:
    """Return the message of a choice; its content is null if the answer only calls functions."""
    content = None if answer.calls and not answer.content else answer.content
    message: Body = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_id, call in zip(call_ids, answer.calls, strict=True)
        ]
    return message


def opening_chunk(heading: Heading, index: int) -> Body:
    opening = heading.choice(index, TextDelta(""), delta={"role": "assistant", "content": ""})
    return heading.body(CHUNK, [opening])


def part_body(part: AnswerDelta, call_ids: Sequence[str]) -> Body:
    """Return the ``delta`` of a piece with one part of the answer."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallBegin(index, name):
            function: dict[str, Any] = {"name": name, "arguments": ""}
            call = {"id": call_ids[index], "type": "function", "function": function}
            return {"tool_calls": [{"index": index, **call}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_chunk(heading: Heading, choice: Body, used: Usage | None = None) -> Body:
    return heading.body(CHUNK, [choice], **so_far(used))
