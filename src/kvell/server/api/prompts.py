"""From what a client sent to token ids that fit the model."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from kvell.errors import ChangeSomething
from kvell.server.api.http_errors import ContextTooLong
from kvell.server.api.schemas import ChatMessage
from kvell.server.text.text_model import TextModel

TokenIds = NDArray[np.int32]


class PromptEncoder:
    """Tokenizes in one thread of its own, so that a long prompt holds nobody up."""

    def __init__(self, model: TextModel, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-tokenizer")

    async def prompt(self, prompt: str | list[int]) -> TokenIds:
        """Token ids of one ``prompt``, int32 ``[tokens]``.

        :raises ChangeSomething: when it is empty, unknown to the model or too long.
        """
        if isinstance(prompt, str):
            ids = await self._in_thread(lambda: self._model.encode(prompt))
            return self._checked("prompt", ids)
        if prompt and max(prompt) >= self._model.vocab_size:
            remedy = f"use ids below {self._model.vocab_size}"
            raise ChangeSomething("prompt", max(prompt), "is not a token of this model", remedy)
        return self._checked("prompt", np.array(prompt, np.int32))

    async def chat(self, messages: Sequence[ChatMessage]) -> TokenIds:
        """Token ids of a conversation, int32 ``[tokens]``.

        :raises ChangeSomething: when it is too long.
        """
        plain = [message.plain() for message in messages]
        ids = await self._in_thread(lambda: self._model.encode_chat(plain))
        return self._checked("messages", ids)

    def room_tokens(self, ids: TokenIds) -> int:
        """Output tokens that fit behind a prompt."""
        return self._max_model_len - len(ids)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], TokenIds]) -> TokenIds:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _checked(self, field: str, ids: TokenIds) -> TokenIds:
        if len(ids) == 0:
            raise ChangeSomething(field, "[]", "has no tokens", "send at least one token")
        if self.room_tokens(ids) < 1:
            problem = f"exceeds the {self._max_model_len} tokens of the model's context"
            remedy = f"send at most {self._max_model_len - 1} tokens"
            raise ContextTooLong(field, f"{len(ids)} tokens", problem, remedy)
        return ids
