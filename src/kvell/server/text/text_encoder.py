"""An encoder of a model's texts in threads, which refuses texts that cannot fit first.

A ``PromptForm`` says which special tokens a prompt gets and where it is truncated.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.models.text.bad_words import bad_word_tokens
from kvell.server.text.lanes import TextWork
from kvell.server.text.text_bounds import SHORT_BYTES, SLICE_CHARS, TextBounds, byte_length
from kvell.server.text.text_model import TextModel

TokenIds = NDArray[np.int32]


class TextEncoder:
    """An encoder of one model's texts within its bounds.

    :param max_model_len: tokens of the model's context.
    :param work: the threads, which all models of a process share.
    """

    def __init__(self, model: TextModel, max_model_len: int, work: TextWork) -> None:
        self._model, self._work = model, work
        self.bounds = TextBounds(max_model_len, model.most_token_bytes)

    def of(self, tenant: str) -> Self:
        """Return the same encoder, whose work is a tenant's."""
        encoder = copy.copy(self)
        encoder._work = self._work.of(tenant)
        return encoder

    async def encode(
        self,
        field: str,
        text: str,
        *,
        answer_tokens: int = 1,
        add_special_tokens: bool = True,
        fits: bool = True,
    ) -> TokenIds:
        """Return the token ids of a prompt, int32 ``[tokens]``; they may still exceed the context.

        :param field: the request's field with the text, for errors.
        :param answer_tokens: tokens of output that must fit after the prompt.
        :param add_special_tokens: whether to add the model's special tokens.
        :param fits: whether the text must fit the context.
        :raises ContextTooLong: when the text must fit and is far too long for the context.
        :raises ChangeSomething: when the text need not fit and is too long to be encoded.
        :raises TryLater: when too many texts wait.
        """
        size_bytes = self.bounds.checked_bytes(field, text, answer_tokens=answer_tokens, fits=fits)

        def read() -> TokenIds:
            if fits:
                self._check_slices(field, text, answer_tokens)
            return self._model.encode(text, add_special_tokens=add_special_tokens)

        return await self._work.run(size_bytes, read)

    async def with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """Return the sampling parameters with the tokens of their bad words.

        :raises ChangeSomething: when a word has no tokens.
        :raises TryLater: when too many texts wait.
        """
        words = sampling.bad_words
        if not words:
            return sampling
        read = partial(bad_word_tokens, words, lambda text: self.plain(text).tolist())
        forms = await self._work.run(sum(map(byte_length, words)), read)
        return replace(sampling, bad_words_token_ids=forms)

    async def encode_conversation(
        self,
        render: Callable[[], str],
        *,
        chars: int,
        fits: bool = True,
        add_special_tokens: bool = False,
    ) -> TokenIds:
        """Return the token ids of a conversation, int32 ``[tokens]``; they may be too many.

        :param render: returns the conversation's text with special tokens; called in a thread.
        :param chars: characters of all values that are rendered.
        :param fits: whether the text must fit the context.
        :param add_special_tokens: whether to add special tokens to those in the text.
        :raises ChangeSomething: when the text is far too long, or ``render`` raises it.
        :raises TryLater: when too many texts wait.
        """
        self.bounds.check_conversation("messages", chars=chars, fits=fits)

        def encode(text: str) -> TokenIds:
            if fits and len(text) > SLICE_CHARS:
                self._check_slices("messages", text)
            return self._model.encode(text, add_special_tokens=add_special_tokens)

        def read() -> TokenIds | str:
            text = render()
            self.bounds.checked_bytes("messages", text, fits=fits)
            is_longer = len(text) > SHORT_BYTES >= chars  # the template made it long
            return text if is_longer else encode(text)

        made = await self._work.run(chars, read)
        if not isinstance(made, str):
            return made
        text = made
        return await self._work.run(len(text), lambda: encode(text))

    def check(self, text: str) -> None:
        """Check that a conversation's text may be encoded; called in a thread.

        :raises ContextTooLong: when the text is far too long for the context.
        """
        self.bounds.checked_bytes("messages", text)
        self._check_slices("messages", text)

    def plain(self, text: str) -> TokenIds:
        """Return the token ids of a text of any length, without added ones; called in a thread."""
        return self._model.encode(text, add_special_tokens=False)

    def _check_slices(self, field: str, text: str, answer_tokens: int = 1) -> None:
        count = lambda piece: len(self.plain(piece))  # noqa: E731
        self.bounds.check_slices(field, text, count, answer_tokens=answer_tokens)


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
