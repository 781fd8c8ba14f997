"""The options of Ollama's requests."""

from typing import Annotated

from pydantic import Field

from kvell.server.api.schemas.other_fields import OPTION_OTHERS
from kvell.server.api.schemas.request_body import RequestPart
from kvell.server.api.schemas.sampling_fields import (
    MAX_INT32,
    RepetitionPenalty,
    StopText,
    StopTexts,
)

Tokens = Annotated[int, Field(ge=-2, le=MAX_INT32)]
SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
"""Options with the same name in chat and text completions."""
LAST_TOKENS = 64
"""Ollama's default of ``repeat_last_n``."""


class OllamaOptions(RequestPart):
    """The field ``options``; null means the model's own recommendation, or no limit."""

    others = OPTION_OTHERS
    place = "options."

    num_predict: Tokens | None = None
    """Maximum output tokens; as many as fit if null, 0, -1 or -2."""
    temperature: float | None = None
    """0 chooses the likeliest token."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches it."""
    min_p: float | None = None
    """Drop tokens below this fraction of the likeliest token's probability."""
    seed: int | None = None
    """With a seed, the same request has the same answer; -1 or null draws a seed, at random or from
    the server's ``--seed``."""
    stop: StopText | StopTexts | None = None
    """The answer ends before the first of these texts."""
    repeat_penalty: RepetitionPenalty | None = None
    """Divides the positive logits of tokens in prompt and output; 1 for no penalty."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Penalties look at this number of last tokens; -1 for all, 0 for no penalties; 64 if null and
    the options have a penalty."""
    presence_penalty: float | None = None
    """Is subtracted from the logits of all tokens in the output."""
    frequency_penalty: float | None = None
    """Is subtracted from a token's logit once for each time that the output has it."""
    num_ctx: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Needed tokens of prompt and answer: the context is the served one, whatever it is; the log
    has one line for each number above it."""

    def excess_context(self, context_tokens: int) -> set[str]:
        needed = self.num_ctx or 0
        return {f"{needed} (served: {context_tokens})"} if needed > context_tokens else set()

    def sampling_fields(self) -> dict[str, object]:
        """Return the fields of a request to chat or text completions."""
        limit = self.num_predict
        return {
            **{name: getattr(self, name) for name in (*SAME, "seed", "stop")},
            "repetition_penalty": self.repeat_penalty,
            "repeat_last_n": self._window(),
            "max_tokens": None if limit is not None and limit <= 0 else limit,
        }

    def _window(self) -> int | None:
        """Return the number of last tokens at which penalties look; None for the model's own."""
        penalties = self.repeat_penalty, self.presence_penalty, self.frequency_penalty
        if self.repeat_last_n is None and any(penalty is not None for penalty in penalties):
            return LAST_TOKENS
        return self.repeat_last_n
