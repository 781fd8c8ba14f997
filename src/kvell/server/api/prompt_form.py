"""Forms of prompts: special tokens and truncation."""

from dataclasses import dataclass

from kvell.errors import ChangeSomething
from kvell.server.text.text_encoder import TokenIds


@dataclass(frozen=True)
class PromptForm:
    """Special tokens and truncation of a prompt.

    :param add_special_tokens: whether the text gets the model's special tokens.
    :param last_tokens: number of tokens to keep, from the end; -1 keeps as many as leave room for
        ``answer_tokens``, None keeps all.
    """

    add_special_tokens: bool = True
    last_tokens: int | None = None
    answer_tokens: int = 1

    @property
    def cuts(self) -> bool:
        """Whether a long prompt is truncated instead of refused."""
        return self.last_tokens is not None

    def kept_of(self, ids: TokenIds, most_tokens: int) -> TokenIds:
        """Return the tokens that are kept, int32 ``[tokens]``.

        :param most_tokens: size of the model's context.
        :raises ChangeSomething: if ``last_tokens`` exceeds ``most_tokens``.
        """
        kept = self.last_tokens
        if kept is None:
            return ids
        if kept > most_tokens:
            problem = f"exceeds the {most_tokens} tokens of the model's context"
            remedy = f"use at most {most_tokens}, or -1 for as many as fit"
            raise ChangeSomething("truncate_prompt_tokens", kept, problem, remedy)
        return ids[-(kept if kept > 0 else max(1, most_tokens - self.answer_tokens)) :]


TEXT_FORM, CHAT_FORM = PromptForm(), PromptForm(add_special_tokens=False)
"""Forms of texts and of conversations, which have the special tokens of the chat template."""
