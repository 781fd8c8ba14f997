"""What a model's processor gave for a prompt: its tensors checked, its placeholders counted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvell.errors import ChangeSomething
from kvell.models.images.image_content import Image, Ints, Span, Tensors


def runs(
    token_ids: Ints, images: Sequence[Image], placeholder: int, counts: Sequence[int]
) -> list[tuple[int, Span]]:
    """For each image the next so many placeholders, which stand together.

    :returns: (first token, span) in order.
    :raises ChangeSomething: if there are more or fewer, or text among those of one image.
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
    """:raises ChangeSomething: if there are tensors of a film, which nobody would look at."""
    for name, tensor in tensors.items():
        if "video" in name:
            raise ChangeSomething(
                f"images.{name}",
                tuple(torch.as_tensor(tensor).shape),
                "is of a film; images are served",
                "leave it out, or give its frames as images",
            )


def same_count(found: int, wanted: int, placeholder: int) -> None:
    """:raises ChangeSomething: if a prompt has not the placeholders that its images want."""
    if found != wanted:
        raise ChangeSomething(
            "prompt",
            f"{found} tokens of id {placeholder}",
            f"has not the {wanted} that its images stand for",
            "give token ids and tensors as the model's processor makes them together",
        )


def named(tensors: Tensors, name: str, dimensions: int) -> torch.Tensor:
    """One of the tensors.

    :raises ChangeSomething: if it is missing, or has more or fewer dimensions.
    """
    if name not in tensors:
        raise wrong(name, "nothing", "is missing")
    tensor = torch.as_tensor(tensors[name])
    if tensor.dim() != dimensions:
        raise wrong(name, tuple(tensor.shape), f"must have {dimensions} dimensions")
    return tensor


def same_length(left: torch.Tensor, right: torch.Tensor, name: str) -> None:
    """:raises ChangeSomething: if two tensors are not of equally many images."""
    if len(left) != len(right):
        raise wrong(name, tuple(right.shape), f"is not of {len(left)} images")


def wrong(name: str, value: object, problem: str) -> ChangeSomething:
    """What is said of a tensor that cannot be taken."""
    return ChangeSomething(
        f"images.{name}", value, problem, "give what the model's processor returns for the prompt"
    )


def on_device(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """As the model's encoder takes them."""
    return pixels.to(model.device, model.dtype)
