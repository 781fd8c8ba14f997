"""OpenAI's response bodies, as plain dictionaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvell.server.text_stream import TextDelta, Usage

Body = dict[str, Any]


@dataclass(frozen=True)
class Heading:
    """What every body of one answer repeats."""

    answer_id: str
    model: str
    created: int

    def body(self, kind: str, choices: Sequence[Body], **more: Any) -> Body:
        """A body of one kind with its choices."""
        head = {"id": self.answer_id, "object": kind, "created": self.created}
        return {**head, "model": self.model, "choices": list(choices), **more}


def usage_body(usage: Usage) -> Body:
    """OpenAI's ``usage``; cached tokens were not computed again."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """A request's deltas as one."""
    last = deltas[-1]
    return TextDelta("".join(delta.text for delta in deltas), last.finish_reason, last.usage)


def completion_body(heading: Heading, answers: Sequence[TextDelta]) -> Body:
    """A whole text completion: the choices of the first prompt, of the second …"""
    choices = [_text_choice(index, answer) for index, answer in enumerate(answers)]
    total = sum((answer.usage for answer in answers), Usage())
    return heading.body("text_completion", choices, usage=usage_body(total))


def completion_chunk(heading: Heading, index: int, delta: TextDelta) -> Body:
    """One piece of a streamed text completion."""
    return heading.body("text_completion", [_text_choice(index, delta)])


def chat_body(heading: Heading, answers: Sequence[TextDelta]) -> Body:
    """A whole chat completion, one choice per answer."""
    choices = [_message_choice(index, answer) for index, answer in enumerate(answers)]
    total = sum((answer.usage for answer in answers), Usage())
    return heading.body("chat.completion", choices, usage=usage_body(total))


def chat_opening(heading: Heading, index: int) -> Body:
    """The first piece of an answer in a streamed chat completion: who speaks."""
    delta = {"role": "assistant", "content": ""}
    return heading.body("chat.completion.chunk", [_choice(index, None, delta=delta)])


def chat_chunk(heading: Heading, index: int, delta: TextDelta) -> Body:
    """One piece of a streamed chat completion."""
    content = {"content": delta.text} if delta.text else {}
    choice = _choice(index, delta.finish_reason, delta=content)
    return heading.body("chat.completion.chunk", [choice])


def usage_chunk(heading: Heading, kind: str, usage: Usage) -> Body:
    """The last piece of a stream that was asked for usage."""
    return heading.body(kind, [], usage=usage_body(usage))


def model_list(name: str, max_model_len: int, created: int) -> Body:
    """Body of ``/v1/models``."""
    card = {"id": name, "object": "model", "created": created, "owned_by": "kvell"}
    return {"object": "list", "data": [{**card, "max_model_len": max_model_len}]}


def _message_choice(index: int, answer: TextDelta) -> Body:
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    return _choice(index, answer.finish_reason, message=message)


def _text_choice(index: int, delta: TextDelta) -> Body:
    return _choice(index, delta.finish_reason, text=delta.text)


def _choice(index: int, finish_reason: str | None, **content: Any) -> Body:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
