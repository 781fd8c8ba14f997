"""A model's texts to token ids in threads; texts that can never fit are refused unread."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.models.text.bad_words import bad_word_tokens
from kvell.server.text.lanes import TextWork
from kvell.server.text.text_bounds import SHORT_BYTES, TextBounds, byte_length
from kvell.server.text.text_model import TextModel

TokenIds = NDArray[np.int32]


class TextEncoder:
    """Encodes texts of one model within its bounds.

    :param max_model_len: tokens of the model's context.
    :param work: the threads, which the models of a process share.
    """

    def __init__(self, model: TextModel, max_model_len: int, work: TextWork) -> None:
        self._model, self._work = model, work
        self.bounds = TextBounds(max_model_len, model.most_token_bytes)

    def of(self, work: TextWork) -> "TextEncoder":
        """The same encoder with other threads."""
        found = copy.copy(self)
        found._work = work
        return found

    async def encoded(
        self,
        field: str,
        text: str,
        *,
        answer_tokens: int = 1,
        add_special_tokens: bool = True,
        fits: bool = True,
    ) -> TokenIds:
        """Token ids of a prompt, int32 ``[tokens]``; they may still be too many for an answer.

        :param field: that has it, for errors.
        :param answer_tokens: for which it must leave room.
        :param add_special_tokens: whether it gets the special tokens that the model wants.
        :param fits: whether the text must fit the context.
        :raises ContextTooLong: when it is far too long for the context.
        :raises ChangeSomething: when it is longer than anything that is encoded.
        :raises TryLater: when too many texts wait.
        """
        size_bytes = self.bounds.checked_bytes(field, text, answer_tokens=answer_tokens, fits=fits)

        def read() -> TokenIds:
            if fits:
                self._check_slices(field, text, answer_tokens)
            return self._model.encode(text, add_special_tokens=add_special_tokens)

        return await self._work.run(size_bytes, read)

    async def with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """The same sampling, with the tokens of its bad words.

        :raises ChangeSomething: when a word has no tokens.
        :raises TryLater: when too many texts wait.
        """
        words = sampling.bad_words
        if not words:
            return sampling
        read = partial(bad_word_tokens, words, lambda text: self.plain(text).tolist())
        forms = await self._work.run(sum(map(byte_length, words)), read)
        return replace(sampling, bad_words_token_ids=forms)

    async def rendered(
        self,
        render: Callable[[], str],
        *,
        chars: int,
        fits: bool = True,
        add_special_tokens: bool = False,
    ) -> TokenIds:
        """Token ids of a conversation, int32 ``[tokens]``; they may still be too many.

        :param render: makes its text, with special tokens in it; is called in a thread.
        :param chars: of all that it renders.
        :param fits: whether the text must fit the context.
        :param add_special_tokens: whether it gets others beside those that are in it.
        :raises ChangeSomething: when it is far too long, or ``render`` raises it.
        :raises TryLater: when too many texts wait.
        """
        self.bounds.check_conversation("messages", chars=chars, fits=fits)

        def encode(text: str) -> TokenIds:
            if fits:
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
        """Check that a conversation's text may be encoded; for a thread.

        :raises ContextTooLong: when it is far too long for the context.
        """
        self.bounds.checked_bytes("messages", text)
        self._check_slices("messages", text)

    def plain(self, text: str) -> TokenIds:
        """Token ids of a text without added ones, whatever its length; for a thread."""
        return self._model.encode(text, add_special_tokens=False)

    def _check_slices(self, field: str, text: str, answer_tokens: int = 1) -> None:
        count = lambda piece: len(self.plain(piece))  # noqa: E731
        self.bounds.check_slices(field, text, count, answer_tokens=answer_tokens)
