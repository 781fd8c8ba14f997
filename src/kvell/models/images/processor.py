"""A model's own processor: from a conversation with pictures to token ids and tensors."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvell.errors import ChangeSomething
from kvell.models.images.picture_files import picture

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


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
        fields: Mapping[str, Any],
        *,
        opens_answer: bool,
    ) -> tuple[npt.NDArray[np.int32], dict[str, Any]]:
        """Token ids (int32 [tokens]) and the tensors of the images, by name.

        :param files: encoded pictures, in the order of their places in the messages.
        :raises ChangeSomething: if a picture cannot be read, or the template refuses the messages.
        """
        pictures = [picture(file, f"image {number}") for number, file in enumerate(files)]
        try:
            text = self._processor.apply_chat_template(
                list(messages), add_generation_prompt=opens_answer, tokenize=False, **fields
            )
            made = self._processor(text=[text], images=pictures, return_tensors="pt")
        except (TypeError, KeyError, ValueError) as error:
            line = " ".join(str(error).split())[:200]
            problem = f"cannot be read by the model's processor ({line})"
            raise ChangeSomething("messages", "…", problem, "send fewer or other images") from error
        ids = made.pop("input_ids")[0].numpy().astype(np.int32)
        made.pop("attention_mask", None)
        return ids, {name: value for name, value in made.items() if hasattr(value, "detach")}

    @cached_property
    def _processor(self) -> Any:
        # Imported here: it takes seconds, and most servers never see a picture.
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self._path, local_files_only=True)
