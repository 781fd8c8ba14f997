"""The bodies of ``/tokenize`` and ``/detokenize``, as in vLLM."""

from typing import Annotated, Any

from pydantic import Field

from kvell.server.api.schemas.chat import MAX_MESSAGES, MAX_TOOLS, ChatMessage, checked_ending
from kvell.server.api.schemas.request_body import RequestBody
from kvell.server.api.schemas.sampling_fields import TokenIds


class TokenizeRequest(RequestBody):
    """The body of ``/tokenize``: a text or a conversation."""

    prompt: str | None = None
    """A text; null if ``messages`` are given."""
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    """A conversation; null if ``prompt`` is given."""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True
    """Whether a text gets the special tokens of a prompt."""
    return_token_strs: bool | None = False
    """Return the text of each token too."""

    def continues_last(self) -> bool:
        return checked_ending(self.add_generation_prompt, self.continue_final_message)

    def template_fields(self) -> dict[str, Any]:
        return dict(self.chat_template_kwargs or {})


class DetokenizeRequest(RequestBody):
    """The body of ``/detokenize``."""

    tokens: TokenIds
    """Token ids, each below the size of the vocabulary."""
