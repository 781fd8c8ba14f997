"""A model's own processor: from a conversation with pictures to token ids and tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from kvell.errors import ChangeSomething
from kvell.models.images.picture_files import pictures
from kvell.models.text.tokenizer import check_template_fields

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MOST_TENSOR_BYTES = 512 << 20
"""Bytes of the tensors of one request: small pictures may make large ones (Llama 3.2 Vision, 14 MiB
for a picture of any size)."""


class PictureProcessor:
    """Transformers' processor of a model's directory, loaded at its first use."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, path: Path) -> "PictureProcessor | None":
        """The processor of a directory; None if it has none."""
        has_one = any((path / name).is_file() for name in PROCESSOR_FILES)
        return cls(path) if has_one else None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        files: Sequence[bytes],
        tools: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        *,
        opens_answer: bool,
        check: Callable[[str], None] = lambda text: None,
    ) -> tuple[npt.NDArray[np.int32], dict[str, Any]]:
        """Token ids (int32 [tokens]) and the tensors of the images, by name.

        :param files: encoded pictures, in the order of their places in the messages.
        :param tools: functions that the answer may call, in OpenAI's form.
        :param check: raises if the conversation's text is too long; called before pictures are
            decoded.
        :raises ChangeSomething: if a picture cannot be read, the pictures or their tensors are too
            large together, the template refuses the messages, or it has no place for tools.
        """
        check_template_fields(fields)
        try:
            text = self._text(messages, tools, fields, opens_answer)
            if tools and text == self._text(messages, (), fields, opens_answer):
                problem = "have no place in the model's chat template beside images"
                remedy = "leave them out, or serve a model whose template takes tools"
                raise ChangeSomething("tools", f"{len(tools)} functions", problem, remedy)
            check(text)
            made = self._processor(text=[text], images=pictures(files), return_tensors="pt")
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            line = " ".join(str(error).split())[:200]
            problem = f"cannot be read by the model's processor ({line})"
            raise ChangeSomething("messages", "…", problem, "send fewer or other images") from error
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        tensors = {name: value for name, value in made.items() if hasattr(value, "detach")}
        tensor_bytes = sum(one.numel() * one.element_size() for one in tensors.values())
        if tensor_bytes > MOST_TENSOR_BYTES:
            value, problem = f"{len(files)} images", f"make tensors of {tensor_bytes} bytes"
            remedy = f"send fewer or smaller images: at most {MOST_TENSOR_BYTES} bytes"
            raise ChangeSomething("messages", value, problem, remedy, bound="image_pixels")
        return ids, tensors

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        opens_answer: bool,
    ) -> str:
        """The conversation by the chat template, or by one of its own for tools if there is one."""
        own = self._processor.chat_template
        named = {"chat_template": "tool_use"} if tools and "tool_use" in _names(own) else {}
        text: str = self._processor.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=opens_answer,
            tokenize=False,
            **named,
            **fields,
        )
        return text

    @cached_property
    def _processor(self) -> Any:
        # Imported here: it takes seconds, and most servers never see a picture.
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self._path, local_files_only=True)


def _names(templates: object) -> Iterable[str]:
    """The names of several chat templates; none if there is only one."""
    return templates if isinstance(templates, dict) else ()
