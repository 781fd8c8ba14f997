"""OpenAI's response bodies, as plain dictionaries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvell.server.text.text_stream import TextDelta, Usage

Body = dict[str, Any]


@dataclass(frozen=True)
class Heading:
    """What every body of one answer repeats.

    :param tells_token_ids: choices hold the ids of their tokens beside the text.
    """

    answer_id: str
    model: str
    created: int
    tells_token_ids: bool = False

    def choice(self, index: int, delta: TextDelta, /, **content: Any) -> Body:
        """A choice with what is new of it."""
        told = {"token_ids": list(delta.token_ids)} if self.tells_token_ids else {}
        return {
            "index": index,
            **content,
            **told,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }

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
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return TextDelta(text, last.finish_reason, last.usage, token_ids)


def completion_body(heading: Heading, answers: Sequence[TextDelta]) -> Body:
    """A whole text completion: the choices of the first prompt, of the second …"""
    choices = [heading.choice(i, answer, text=answer.text) for i, answer in enumerate(answers)]
    total = sum((answer.usage for answer in answers), Usage())
    return heading.body("text_completion", choices, usage=usage_body(total))


def completion_chunk(
    heading: Heading, index: int, delta: TextDelta, used: Usage | None = None
) -> Body:
    """One piece of a streamed text completion, with what was ``used`` so far if asked for."""
    choices = [heading.choice(index, delta, text=delta.text)]
    return heading.body("text_completion", choices, **_so_far(used))


def chat_body(heading: Heading, answers: Sequence[TextDelta]) -> Body:
    """A whole chat completion, one choice per answer."""
    choices = [
        heading.choice(i, answer, message=_message(answer)) for i, answer in enumerate(answers)
    ]
    total = sum((answer.usage for answer in answers), Usage())
    return heading.body("chat.completion", choices, usage=usage_body(total))


def chat_opening(heading: Heading, index: int) -> Body:
    """The first piece of an answer in a streamed chat completion: who speaks."""
    opening = heading.choice(index, TextDelta(""), delta={"role": "assistant", "content": ""})
    return heading.body("chat.completion.chunk", [opening])


def chat_chunk(heading: Heading, index: int, delta: TextDelta, used: Usage | None = None) -> Body:
    """One piece of a streamed chat completion, with what was ``used`` so far if asked for."""
    content = {"content": delta.text} if delta.text else {}
    choices = [heading.choice(index, delta, delta=content)]
    return heading.body("chat.completion.chunk", choices, **_so_far(used))


def usage_chunk(heading: Heading, kind: str, usage: Usage) -> Body:
    """The last piece of a stream that was asked for usage."""
    return heading.body(kind, [], usage=usage_body(usage))


def model_list(lengths: Mapping[str, int], created: int) -> Body:
    """Body of ``/v1/models``, from each model's name and ``max_model_len``."""
    card = {"object": "model", "created": created, "owned_by": "kvell"}
    cards = [{"id": name, **card, "max_model_len": n} for name, n in lengths.items()]
    return {"object": "list", "data": cards}


def _so_far(used: Usage | None) -> Body:
    return {} if used is None else {"usage": usage_body(used)}


def _message(answer: TextDelta) -> Body:
    return {"role": "assistant", "content": answer.text, "refusal": None}
