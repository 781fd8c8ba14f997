"""Bodies of text completions, and fields that all bodies of answers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvell.server.api.bodies.pieces import Lazy
from kvell.server.text.context_length import ContextLength
from kvell.server.text.text_stream import TextDelta, Usage

Body = dict[str, Any]


@dataclass(frozen=True)
class Heading:
    """The fields that all bodies of one answer repeat.

    :param tells_token_ids: whether choices have the ids of their tokens as well as the text.
    """

    answer_id: str
    model: str
    created: int
    tells_token_ids: bool = False

    def choice(
        self, index: int, delta: TextDelta, logprobs: Body | None = None, /, **content: Any
    ) -> Body:
        """Return a choice with the new part of an answer."""
        token_ids = {"token_ids": list(delta.token_ids)} if self.tells_token_ids else {}
        return {
            "index": index,
            **content,
            **token_ids,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def body(self, kind: str, choices: Sequence[Body] | Lazy, **more: Any) -> Body:
        head = {"id": self.answer_id, "object": kind, "created": self.created}
        return {**head, "model": self.model, "choices": choices, **more}


def usage_body(usage: Usage, reasoning_tokens: int | None = None) -> Body:
    """Return OpenAI's ``usage``; cached tokens were not computed again.

    :param reasoning_tokens: None if the answer's reasoning is not separated.
    """
    details: Body = {}
    if reasoning_tokens is not None:
        tokens = min(reasoning_tokens, usage.completion_tokens)
        details["completion_tokens_details"] = {"reasoning_tokens": tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": cache_details(usage),
        **details,
    }


def cache_details(usage: Usage) -> Body:
    """Return the numbers of prompt tokens read from the cache and written to the cache."""
    return {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}


def completion_body(heading: Heading, choices: Sequence[Body] | Lazy, total: Usage) -> Body:
    """Return a whole text completion: the choices of the first prompt, of the second …"""
    return heading.body("text_completion", choices, usage=usage_body(total))


def completion_chunk(heading: Heading, choice: Body, used: Usage | None = None) -> Body:
    return heading.body("text_completion", [choice], **so_far(used))


def usage_chunk(
    heading: Heading, kind: str, usage: Usage, reasoning_tokens: int | None = None
) -> Body:
    return heading.body(kind, [], usage=usage_body(usage, reasoning_tokens))


def so_far(used: Usage | None) -> Body:
    return {} if used is None else {"usage": usage_body(used)}


def model_card(
    name: str, length: ContextLength, created: int, takes_tools: bool | None = None
) -> Body:
    """Return OpenAI's description of a model, with vLLM's ``max_model_len``.

    ``max_model_len`` is the limit of one instance; ``reach_tokens`` includes borrowed memory.

    :param takes_tools: whether the chat template shows tools; None if there is no template.
    """
    card = {"id": name, "object": "model", "created": created, "owned_by": "kvell"}
    reach_tokens = length.reach_tokens
    card |= {"max_model_len": length.alone_tokens, "reach_tokens": reach_tokens}
    return {**card, "chat_template_takes_tools": takes_tools}


def model_list(cards: Sequence[Body]) -> Body:
    """Return the body of ``/v1/models``."""
    return {"object": "list", "data": list(cards)}
