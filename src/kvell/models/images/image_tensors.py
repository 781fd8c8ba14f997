"""Checks of the tensors of a model's processor, and counts of a prompt's placeholders."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvell.errors import ChangeSomething
from kvell.models.images.image_content import Image, Ints, Span, Tensors


def runs(
    token_ids: Ints, images: Sequence[Image], placeholder: int, counts: Sequence[int]
) -> list[tuple[int, Span]]:
    """Give each image its run of placeholders, in order.

    :param counts: placeholders of each image.
    :returns: (first token, span) in order.
    :raises ChangeSomething: if the prompt has more or fewer, or text among those of one image.
    """
    places = np.flatnonzero(token_ids == placeholder)
    same_count(len(places), sum(counts), placeholder)
    spans, begin = [], 0
    for image, count in zip(images, counts, strict=True):
        own = places[begin : begin + count]
        if own[-1] - own[0] != count - 1:
            raise ChangeSomething(
                "prompt", "…", "has text among the tokens of an image", "keep them together"
            )
        begin += count
        start = int(own[0])
        spans.append((start, Span(token_ids[start : start + count], (image,), placeholder)))
    return spans


def require_no_films(tensors: Tensors) -> None:
    """Refuse tensors of a video, which would be ignored.

    :raises ChangeSomething: naming the first such tensor.
    """
    for name, tensor in tensors.items():
        if "video" in name:
            raise ChangeSomething(
                f"images.{name}",
                tuple(torch.as_tensor(tensor).shape),
                "is of a video; only images are served",
                "leave it out, or give its frames as images",
            )


def same_count(count: int, wanted: int, placeholder: int) -> None:
    """Raise unless a prompt has as many placeholders as its images need.

    :raises ChangeSomething: if it has more or fewer.
    """
    if count != wanted:
        raise ChangeSomething(
            "prompt",
            f"{count} tokens of id {placeholder}",
            f"does not have the {wanted} that its images need",
            "give token ids and tensors as the model's processor makes them together",
        )


def take_tensor(tensors: Tensors, name: str, dimensions: int) -> torch.Tensor:
    """Return the tensor of a name.

    :raises ChangeSomething: if it is missing, or has more or fewer dimensions.
    """
    if name not in tensors:
        raise wrong(name, "nothing", "is missing")
    tensor = torch.as_tensor(tensors[name])
    if tensor.dim() != dimensions:
        raise wrong(name, tuple(tensor.shape), f"must have {dimensions} dimensions")
    return tensor


def same_length(left: torch.Tensor, right: torch.Tensor, name: str) -> None:
    """Raise unless two tensors hold the same number of images.

    :raises ChangeSomething: if they do not; names the right one.
    """
    if len(left) != len(right):
        raise wrong(name, tuple(right.shape), f"is not of {len(left)} images")


def wrong(name: str, value: object, problem: str) -> ChangeSomething:
    return ChangeSomething(
        f"images.{name}", value, problem, "give what the model's processor returns for the prompt"
    )


def on_device(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    return pixels.to(model.device, model.dtype)
