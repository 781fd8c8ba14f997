"""How a text becomes a prompt: with which special tokens, and how much of it is kept."""

from dataclasses import dataclass

from kvell.errors import ChangeSomething
from kvell.server.text.text_encoder import TokenIds


@dataclass(frozen=True)
class PromptForm:
    """How a text becomes a prompt.

    :param add_special_tokens: whether it gets the special tokens that the model wants.
    :param last_tokens: of the prompt that are kept; -1 for as many as leave room for the answer,
        None for all.
    :param answer_tokens: that there must be room for then.
    """

    add_special_tokens: bool = True
    last_tokens: int | None = None
    answer_tokens: int = 1

    @property
    def cuts(self) -> bool:
        """Whether a long prompt is cut rather than refused."""
        return self.last_tokens is not None

    def kept_of(self, ids: TokenIds, most_tokens: int) -> TokenIds:
        """The tokens that are kept, int32 ``[tokens]``.

        :param most_tokens: of the model's context.
        :raises ChangeSomething: if more are to be kept than fit.
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
"""Of texts; and of conversations, in which the chat template has put the special tokens."""
