"""From what a client sent to token ids that fit the model."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvell.engine.protocol.tensors import SentTensor
from kvell.errors import ChangeSomething
from kvell.server.answers.template_messages import template_messages
from kvell.server.api.http_errors import ContextTooLong
from kvell.server.text.text_model import NO_FIELDS, TextModel

TokenIds = NDArray[np.int32]
Made = TypeVar("Made")


class PromptEncoder:
    """Tokenizes in one thread of its own, so that a long prompt holds nobody up."""

    def __init__(self, model: TextModel, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-tokenizer")

    async def prompt(
        self, prompt: str | list[int], *, field: str = "prompt", answer_tokens: int = 1
    ) -> TokenIds:
        """Token ids of one prompt, int32 ``[tokens]``.

        :param field: that has it, for errors.
        :param answer_tokens: for which it must leave room.
        :raises ChangeSomething: when it is empty, unknown to the model or too long.
        """
        if isinstance(prompt, str):
            ids = await self._in_thread(lambda: self._model.encode(prompt))
            return self._checked(field, ids, answer_tokens)
        if prompt and max(prompt) >= self._model.vocab_size:
            remedy = f"use ids below {self._model.vocab_size}"
            raise ChangeSomething(field, max(prompt), "is not a token of this model", remedy)
        return self._checked(field, np.array(prompt, np.int32), answer_tokens)

    async def text(self, text: str, add_special_tokens: bool) -> TokenIds:
        """Token ids of any text, int32 ``[tokens]``, also of one that is too long to be served."""
        return await self._in_thread(
            lambda: self._model.encode(text, add_special_tokens=add_special_tokens)
        )

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        fits: bool = True,
    ) -> TokenIds:
        """Token ids of a conversation, int32 ``[tokens]``.

        :param tools: that the answer may call.
        :param fields: further variables of the chat template.
        :param opens_answer: whether they end where the answer begins.
        :param fits: whether they must leave room for an answer.
        :raises ChangeSomething: when it is too long, or the template refuses it.
        """
        rendered = template_messages(messages)
        ids = await self._in_thread(
            lambda: self._model.encode_chat(rendered, tools, fields, opens_answer=opens_answer)
        )
        return self._checked("messages", ids) if fits else ids

    async def pictured(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[bytes],
        tools: Sequence[Mapping[str, Any]] = (),
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
    ) -> tuple[TokenIds, tuple[SentTensor, ...]]:
        """Token ids of a conversation with images, and the tensors of its images.

        :param images: encoded files, in the order of their places.
        :param tools: that the answer may call.
        :raises ChangeSomething: when it is too long, an image cannot be read, or the template has
            no place for tools.
        """
        rendered = template_messages(messages)
        ids, tensors = await self._in_thread(
            lambda: self._model.encode_pictured(
                rendered, images, tools, fields, opens_answer=opens_answer
            )
        )
        return self._checked("messages", ids), tensors

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return self._model.takes_images

    async def decoded(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return await self._in_thread(lambda: self._model.decode(token_ids))

    def room_tokens(self, ids: TokenIds) -> int:
        """Output tokens that fit behind a prompt."""
        return self._max_model_len - len(ids)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _checked(self, field: str, ids: TokenIds, answer_tokens: int = 1) -> TokenIds:
        if len(ids) == 0:
            raise ChangeSomething(field, "[]", "has no tokens", "send at least one token")
        if self.room_tokens(ids) < answer_tokens:
            problem = f"exceeds the {self._max_model_len} tokens of the model's context"
            remedy = f"send at most {self._max_model_len - answer_tokens} tokens"
            raise ContextTooLong(field, f"{len(ids)} tokens", problem, remedy)
        return ids
