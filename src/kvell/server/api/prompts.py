"""Encoding of texts and conversations into token ids that fit the model.

Messages of a request as Hugging Face's chat templates expect them.

Arguments of calls stay as they were sent; :mod:`kvell.models.text.chat_template` reads them.  A
tool's message gets the name of the function that its id belongs to.  The functions belong in a
thread of texts, not on an event loop.
"""

import base64
import binascii
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvell.engine.protocol.request_spec import SentTensor
from kvell.errors import ChangeSomething
from kvell.models.text.chat_template import NO_FIELDS, ArgumentReader, changed_arguments
from kvell.server.api.schemas.chat import ChatMessage
from kvell.server.logs.lines import tell
from kvell.server.text.lanes import TextWork
from kvell.server.text.text_bounds import (
    AnswerMemory,
    ContextLength,
    chars_within,
    context_too_long,
)
from kvell.server.text.text_encoder import (
    CHAT_FORM,
    TEXT_FORM,
    PromptForm,
    TextEncoder,
    TokenIds,
)
from kvell.server.text.text_model import TextModel

_READ = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal"}
    | {"reasoning_content", "reasoning"}
)
"""Fields that this module reads; other fields are passed to the template unchanged."""
_ROLES = {"developer": "system", "function": "tool"}
Message = Mapping[str, Any]


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for ``apply_chat_template``.

    :param messages: OpenAI's messages, with content that is text, a list of parts or None.
    :raises ChangeSomething: with the wrong field, such as
        ``messages[2].tool_calls[0].function.name``.
    """
    names: dict[str, str] = {}
    rendered = []
    for i, message in enumerate(messages):
        shown = _rendered(f"messages[{i}]", message)
        for call in shown.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if shown["role"] == "tool" and "name" not in shown and shown["tool_call_id"] in names:
            shown["name"] = names[shown["tool_call_id"]]
        rendered.append(shown)
    return rendered


def with_objects(messages: Sequence[Message]) -> list[Message] | None:
    """Return the messages for templates that iterate over arguments, which must be objects.

    :return: messages with ``{"arguments": …}`` around other arguments; None if all are objects.
    """
    reader = ArgumentReader()
    others = list[object]()

    def read(sent: object) -> object:
        arguments = reader.read(sent)
        if isinstance(arguments, dict):
            return arguments
        others.append(arguments)
        return {"arguments": arguments}

    changed = changed_arguments(messages, read)
    return changed if others else None


def _rendered(field: str, message: Message) -> dict[str, Any]:
    role = _ROLES.get(message["role"], message["role"])
    shown: dict[str, Any] = {key: value for key, value in message.items() if key not in _READ}
    content = message.get("content")
    if not isinstance(content, str):
        content = list(content) if content else ""
    shown |= {"role": role, "content": content}
    if isinstance(message.get("name"), str):
        shown["name"] = message["name"]
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        shown |= {"reasoning_content": reasoning} if isinstance(reasoning, str) else {}
        calls = message.get("tool_calls")
        only = message.get("function_call")
        if only is not None and not calls:
            calls = [{"function": only}]
        if calls:
            places = (f"{field}.tool_calls[{i}]" for i in range(len(calls)))
            shown["tool_calls"] = [_call(*pair) for pair in zip(places, calls, strict=True)]
    if role == "tool":
        shown["tool_call_id"] = str(message.get("tool_call_id") or "")
    return shown


def _call(field: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not function["name"]:
        place = f"{field}.function.name"
        raise ChangeSomething(place, "str", "is not text", "send a string")
    shown = {"name": function["name"], "arguments": function.get("arguments")}
    return {"id": call.get("id", ""), "type": "function", "function": shown}


MOST_IMAGES = 32
MEDIA = tuple(f"data:image/{kind};" for kind in ("png", "jpeg", "jpg", "webp", "gif"))


@dataclass(frozen=True)
class ImageUrl:
    """The data URL of an image.

    :param place: field of the request that has the image, for errors.
    """

    place: str
    url: str

    def file(self) -> bytes:
        """Return the encoded file; decoding is too slow for the thread of the event loop.

        :raises ChangeSomething: if the URL is not a data URL of a supported kind of image.
        """
        head, comma, data = self.url.partition(",")
        if not comma or not f"{head.lower()};".startswith(MEDIA) or not head.endswith("base64"):
            remedy = "send data:image/png;base64,… (or jpeg, webp, gif)"
            raise ChangeSomething(
                self.place, self.url[:24], "is not a data URL of an image", remedy
            )
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            problem, remedy = "is not base64", "encode the whole file"
            raise ChangeSomething(self.place, f"{head[:40]},…", problem, remedy) from None


def image_urls(messages: Sequence[ChatMessage], *, taken: bool) -> list[ImageUrl]:
    """Return the URLs of all images, in order.

    :param taken: whether the model accepts images.
    :raises ChangeSomething: if the model accepts no images, or there are too many.
    """
    urls = [
        ImageUrl(f"messages[{number}].content", url)
        for number, message in enumerate(messages)
        for url in message.images()
    ]
    if urls and not taken:
        raise ChangeSomething(
            urls[0].place, "image_url", "is not accepted by this model", "send text"
        )
    if len(urls) > MOST_IMAGES:
        value, remedy = f"{len(urls)} images", f"send at most {MOST_IMAGES}"
        raise ChangeSomething("messages", value, "are too many", remedy, bound="image_pixels")
    return urls


BYTES_PER_DECODED_TOKEN = 8
NO_PLACE_FOR_TOOLS = "give --chat-template with one that shows tools, or send none"
logger = logging.getLogger(__name__)


class PromptEncoder(TextEncoder):
    """An encoder of prompts that tokenizes in threads, short texts apart from long ones.

    A text that can never fit is refused before it is tokenized.

    :param length: limits of prompt and answer together.
    :param work: the threads, shared by all models of a server.
    """

    def __init__(self, model: TextModel, length: ContextLength, work: TextWork) -> None:
        super().__init__(model, length.longest_tokens, work)
        self._length = length
        self._told_of_tools = [False]  # shared by the encoders of all tenants

    @property
    def answers(self) -> AnswerMemory:
        return self._work.answers

    async def prompt(
        self,
        prompt: str | list[int],
        *,
        field: str = "prompt",
        answer_tokens: int = 1,
        form: PromptForm = TEXT_FORM,
    ) -> TokenIds:
        """Return the token ids of one prompt, int32 ``[tokens]``.

        :param field: request field of the prompt, for errors.
        :param answer_tokens: output tokens for which the prompt must leave room.
        :raises ChangeSomething: if the prompt is empty, has unknown token ids, or is too long.
        :raises TryLater: if too many texts wait.
        """
        most_tokens = self._length.reach_tokens
        if isinstance(prompt, str):
            ids = await self.encode(
                field,
                prompt,
                answer_tokens=answer_tokens,
                add_special_tokens=form.add_special_tokens,
                fits=not form.cuts or len(prompt) > self.bounds.any_bytes,
            )
            return self._checked(field, form.kept_of(ids, most_tokens), answer_tokens)
        if not form.cuts:
            self._check_count(field, len(prompt), answer_tokens)
        self._check_known(field, prompt)
        ids = form.kept_of(np.array(prompt, np.int32), most_tokens)
        return self._checked(field, ids, answer_tokens)

    async def text(self, text: str, add_special_tokens: bool, *, field: str = "prompt") -> TokenIds:
        """Return the token ids of a text, int32 ``[tokens]``, even if it is too long to be served.

        :param field: request field of the text, for errors.
        :raises ChangeSomething: if the text is too long to be encoded.
        """
        return await self.encode(field, text, add_special_tokens=add_special_tokens, fits=False)

    async def around_gap(self, prompt: str | list[int], suffix: str) -> TokenIds:
        """Return the token ids of two texts between which the answer comes, int32 ``[tokens]``.

        :raises ChangeSomething: if the model's tokenizer has no tokens for that, or the texts are
            too long.
        """
        form = self._model.gap_tokens
        if form is None:
            problem = "needs fill-in-the-middle tokens, which the model's tokenizer does not have"
            remedy = "leave it out, or serve a model that has them, such as Qwen2.5-Coder"
            raise ChangeSomething("suffix", "…", problem, remedy)
        if isinstance(prompt, str):
            before = await self.text(prompt, add_special_tokens=False)
        else:
            self._check_known("prompt", prompt)
            before = np.array(prompt, np.int32)
        after = await self.text(suffix, add_special_tokens=False, field="suffix")
        begin = await self.text("", add_special_tokens=True)
        return self._checked("prompt", np.concatenate([begin, form.prompt(before, after)]))

    async def count_answer_tokens(self, text: str) -> int:
        return len(await self._work.run(len(text), lambda: self.plain(text)))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
        continues_last: bool = False,
        fits: bool = True,
        form: PromptForm = CHAT_FORM,
    ) -> TokenIds:
        """Return the token ids of a conversation, int32 ``[tokens]``.

        :param fields: further variables of the chat template.
        :param opens_answer: whether the prompt ends with the opening of an answer.
        :param continues_last: whether the prompt ends within the last message, which the answer
            continues.
        :param fits: whether the prompt must leave room for an answer.
        :raises ChangeSomething: if the prompt is too long, or the template refuses it.
        :raises TryLater: if too many texts wait.
        """
        if tools:
            self._tell_of_tools()
        ending = {"opens_answer": opens_answer, "continues_last": continues_last}

        def render() -> str:
            shown = template_messages(messages)
            try:
                return self._model.rendered_chat(shown, tools, fields, **ending)
            except ChangeSomething:
                objects = with_objects(shown)
                if objects is None:
                    raise
                return self._model.rendered_chat(objects, tools, fields, **ending)

        chars = chars_within((messages, tools, fields))
        cuts = form.last_tokens is not None  # a text that is too long to be encoded is not cut
        ids = await self.encode_conversation(
            render,
            chars=chars,
            fits=fits and (not cuts or chars > self.bounds.any_bytes),
            add_special_tokens=form.add_special_tokens,
        )
        if cuts:
            ids = form.kept_of(ids, self._length.reach_tokens)
        if fits:
            self._check_count("messages", len(ids), 1)
        return ids

    def _tell_of_tools(self) -> None:
        if self._model.takes_tools or self._told_of_tools[0]:
            return
        self._told_of_tools[0] = True
        details = {"model": self._model.name, "remedy": NO_PLACE_FOR_TOOLS}
        tell(logger, logging.WARNING, "chat_template_ignores_tools", **details)

    async def encode_with_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[ImageUrl],
        tools: Sequence[Mapping[str, Any]] = (),
        fields: Mapping[str, Any] = NO_FIELDS,
        *,
        opens_answer: bool = True,
    ) -> tuple[TokenIds, tuple[SentTensor, ...]]:
        """Return the token ids of a conversation with images, and the tensors of the images.

        :param images: in the order of their places in the messages.
        :raises ChangeSomething: if the prompt is too long, an image cannot be read, or the template
            shows no tools and some are given.
        :raises TryLater: if too many images wait, or requests in flight have too many.
        """
        chars = chars_within((messages, tools, fields))
        self.bounds.check_conversation("messages", chars=chars)

        def read() -> tuple[TokenIds, tuple[SentTensor, ...]]:
            self._work.held.check(self._work.tenant)
            files = [image.file() for image in images]
            ids, tensors = self._model.encode_pictured(
                template_messages(messages),
                files,
                tools,
                fields,
                opens_answer=opens_answer,
                check=self.check,
            )
            self._work.held.hold(self._work.tenant, tensors)
            return self._checked("messages", ids), tensors

        size_bytes = chars + sum(len(image.url) for image in images)
        return await self._work.run_pictured(size_bytes, read)

    async def decode(self, token_ids: Sequence[int], sent_as: str = "") -> str:
        """Return the text of token ids.

        :param sent_as: field in which a client sent them; "" if they are a prompt's.
        :raises ChangeSomething: naming the field, if an id is not in the vocabulary.
        """

        def read() -> str:
            if sent_as:
                self._check_known(sent_as, token_ids)
            return self._model.decode(token_ids)

        return await self._work.run(BYTES_PER_DECODED_TOKEN * len(token_ids), read)

    def _check_known(self, field: str, token_ids: Sequence[int]) -> None:
        unknown = max(token_ids, default=0)
        if unknown >= self._model.vocab_size:
            remedy = f"use ids below {self._model.vocab_size}"
            raise ChangeSomething(field, unknown, "is not a token of this model", remedy)

    def _checked(self, field: str, ids: TokenIds, answer_tokens: int = 1) -> TokenIds:
        self._check_count(field, len(ids), answer_tokens)
        return ids

    def _check_count(self, field: str, tokens: int, answer_tokens: int) -> None:
        if tokens == 0:
            raise ChangeSomething(field, "[]", "has no tokens", "send at least one token")
        if self._length.alone_tokens - tokens >= answer_tokens:
            return
        limit = self._length.reach_tokens
        if limit - tokens < answer_tokens:
            remedy = f"send at most {limit - answer_tokens} tokens"
            raise context_too_long(field, f"{tokens} tokens", limit, remedy)
