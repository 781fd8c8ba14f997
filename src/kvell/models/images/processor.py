"""A model's own processor: from a conversation with pictures to token ids and tensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_MODEL_AGAIN, read_by_library
from kvell.models.images.picture_files import pictures
from kvell.models.text.chat_template import (
    THE_MODELS_OWN,
    ChatTemplate,
    ChosenTemplate,
    read_template,
)
from kvell.models.text.tokenizer import check_template_fields

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MOST_TENSOR_BYTES = 512 << 20
"""Most bytes of the tensors of one request: small pictures may make large ones (Llama 3.2 Vision,
14 MiB for a picture of any size)."""


class PictureProcessor:
    """Transformers' processor of a model's directory, loaded at its first use."""

    def __init__(self, path: Path, chosen: ChosenTemplate = THE_MODELS_OWN) -> None:
        self._path, self._chosen = path, chosen

    @classmethod
    def of(cls, path: Path, chosen: ChosenTemplate = THE_MODELS_OWN) -> "PictureProcessor | None":
        has_one = any((path / name).is_file() for name in PROCESSOR_FILES)
        return cls(path, chosen) if has_one else None

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
        """Return token ids (int32 [tokens]) and the tensors of the images, by name.

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
                problem = "cannot be combined with images in the model's chat template"
                remedy = "leave them out, or serve a model whose template takes tools"
                raise ChangeSomething("tools", f"{len(tools)} functions", problem, remedy)
            check(text)
            made = self._processor(text=[text], images=pictures(files), return_tensors="pt")
        except (TemplateError, TypeError, LookupError, ValueError, ArithmeticError) as error:
            line = " ".join(str(error).split())[:200]
            problem = f"cannot be read by the model's processor ({line})"
            raise ChangeSomething("messages", "…", problem, "send fewer or other images") from error
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        tensors = {name: value for name, value in made.items() if hasattr(value, "detach")}
        tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if tensor_bytes > MOST_TENSOR_BYTES:
            value, problem = f"{len(files)} images", f"make tensors of {tensor_bytes} bytes"
            remedy = f"send fewer or smaller images: at most {MOST_TENSOR_BYTES} bytes"
            raise ChangeSomething("messages", value, problem, remedy, bound="image_pixels")
        return ids, tensors

    def _text(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        fields: Mapping[str, object],
        opens_answer: bool,
    ) -> str:
        template = self._template
        if template is None:
            raise ValueError("it has no chat template")
        return template.render(messages, tools, fields, opens_answer=opens_answer)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        """The chat template, probed once for its content format; None if there is none."""
        own_template, tokenizer = self._processor.chat_template, self._processor.tokenizer
        return read_template(
            own_template,
            self._chosen,
            self._path,
            tokenizer.special_tokens_map,
            tokenizer.added_tokens_decoder,
        )

    @cached_property
    def _processor(self) -> Any:
        # Imported here: it takes seconds, and most servers never see a picture.
        from transformers import AutoProcessor

        with read_by_library(self._path, "its processor does not load", FETCH_MODEL_AGAIN):
            return AutoProcessor.from_pretrained(self._path, local_files_only=True)
