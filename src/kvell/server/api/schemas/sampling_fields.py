"""Fields of chat and text completions: allowed tokens, special tokens, truncation."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from kvell.engine.protocol.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    SamplingParams,
)
from kvell.errors import ChangeSomething
from kvell.server.api.prompt_form import PromptForm
from kvell.server.api.schemas.request_body import RequestBody

MAX_INT32 = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
AllowedTokens = Annotated[
    list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)
]
LastTokens = Annotated[int, Field(ge=-1, le=MAX_INT32)]


class SamplingFields(RequestBody):
    """vLLM's additional fields; null means the default."""

    bad_words: BadWords | None = None
    allowed_token_ids: AllowedTokens | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    """Accepted and not used.  Special tokens are in the text as the model wrote them."""
    truncate_prompt_tokens: LastTokens | None = None
    """Number of tokens to keep of a prompt, from its end; -1 keeps as many as leave room for
    ``max_tokens`` in the model's context."""

    def with_bounds(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with these fields.

        :raises ChangeSomething: naming a field that is out of range.
        """
        allowed = self.allowed_token_ids
        return replace(
            sampling,
            bad_words=tuple(self.bad_words or ()),
            allowed_token_ids=None if allowed is None else tuple(allowed),
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )

    def prompt_form(self, *, add_special_tokens: bool, answer_tokens: int | None) -> PromptForm:
        """Return the form of the request's prompt.

        :param answer_tokens: requested output tokens; None for as many as fit.
        :raises ChangeSomething: if the form keeps no token.
        """
        if self.truncate_prompt_tokens == 0:
            remedy = "use -1 for as many as fit, or leave it out"
            raise ChangeSomething("truncate_prompt_tokens", 0, "leaves no prompt", remedy)
        return PromptForm(add_special_tokens, self.truncate_prompt_tokens, answer_tokens or 1)
