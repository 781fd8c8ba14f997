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
    :param end_token_ids: tokens of which one at the end of a text stays if the text is cut; not
        None: the tokens to keep are the first ones instead of the last ones.
    """

    add_special_tokens: bool = True
    last_tokens: int | None = None
    answer_tokens: int = 1
    end_token_ids: frozenset[int] | None = None

    @property
    def cuts(self) -> bool:
        """Whether a long prompt is truncated instead of refused."""
        return self.last_tokens is not None

    def kept_of(self, ids: TokenIds, most_tokens: int) -> TokenIds:
        """Return the tokens that are kept, int32 ``[tokens]``.

        :raises ChangeSomething: if ``last_tokens`` exceeds ``most_tokens``.
        """
        kept = self.last_tokens
        if kept is None:
            return ids
        if kept > most_tokens:
            problem = f"exceeds the {most_tokens} tokens of the model's context"
            remedy = f"use at most {most_tokens}, or -1 for as many as fit"
            raise ChangeSomething("truncate_prompt_tokens", kept, problem, remedy)
        count = kept if kept > 0 else max(1, most_tokens - self.answer_tokens)
        if self.end_token_ids is None or len(ids) <= count:
            return ids[-count:]
        first = ids[:count].copy()
        if int(ids[-1]) in self.end_token_ids:
            first[-1] = ids[-1]
        return first


TEXT_FORM, CHAT_FORM = PromptForm(), PromptForm(add_special_tokens=False)
"""Forms of texts and of conversations, which have the special tokens of the chat template."""


def form_cut_at_end(end_token_ids: frozenset[int]) -> PromptForm:
    return PromptForm(last_tokens=-1, answer_tokens=0, end_token_ids=end_token_ids)
