"""The images of requests in flight.

The store belongs to an engine: commands name images by content id, and the runner looks them up
here. Encoder outputs are stored in the pool and nowhere else.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from kvell.errors import ChangeSomething
from kvell.models.images.image_content import (
    DIGEST_BYTES,
    ContentIds,
    ImagePrompt,
    Ints,
    Span,
    Tensors,
)
from kvell.models.images.image_families import ImageFamily
from kvell.models.images.image_tensors import require_no_films

ID_BYTES = 4


class ImageStore:
    """Spans by content id, each with a count of the prompts that use it.

    ::

        take ──► stored ──release (as often as taken)──► removed, its id reserved

    :ivar encoder_runs: images encoded so far.
    """

    def __init__(self, family: ImageFamily) -> None:
        self.family = family
        self.encoder_runs = 0
        self._ids = ContentIds()
        self._spans: dict[int, Span] = {}
        self._users: Counter[int] = Counter()

    def take(self, token_ids: Ints, tensors: Tensors) -> ImagePrompt:
        """Register a prompt's images until :meth:`release`.

        :param token_ids: int32 [n], as the model's processor gives them.
        :raises ChangeSomething: if prompt and tensors do not match, or a tensor is of a video.
        """
        require_no_films(tensors)
        spans = self.family.spans(token_ids, self.family.read_images(tensors))
        ids = token_ids.copy()
        rows = []
        for start, span in spans:
            content = self._ids.id_of(span.digest)
            self._spans.setdefault(content, span)
            self._users[content] += 1
            ids[start : start + len(span.token_ids)] = content
            if span.leads:  # embeddings depend on the images alone
                ids[start : start + span.image_tokens] = self._ids.id_of(span.images_digest)
            rows.append((start, len(span.token_ids), span.image_tokens))
        return ImagePrompt(ids, tuple(rows))

    def release(self, prompt: ImagePrompt) -> None:
        """Release the prompt of a closed request; call once for each :meth:`take`."""
        for start, tokens, _ in prompt.images:
            content = int(prompt.token_ids[start + tokens - 1])
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content], self._spans[content]

    def knows(self, contents: Sequence[int]) -> bool:
        return all(content in self._spans for content in contents)

    def contents(self, token_ids: Ints) -> bytes:
        """Return the contents of ids below 0, for :meth:`agrees` of another process's store.

        :raises KeyError: if an id has no content.
        """
        return b"".join(
            int(token).to_bytes(ID_BYTES, "little", signed=True) + self._ids.digest_of(int(token))
            for token in token_ids
        )

    def agrees(self, token_ids: Ints, contents: bytes) -> bool:
        """Return whether ids below 0 have the same contents here; unknown ids get them."""
        size = ID_BYTES + DIGEST_BYTES
        rows = [contents[at : at + size] for at in range(0, len(contents), size)]
        digests = {
            int.from_bytes(row[:ID_BYTES], "little", signed=True): row[ID_BYTES:] for row in rows
        }
        if set(digests) != {int(content) for content in token_ids}:
            return False
        return all(self._ids.id_of(digest) == content for content, digest in digests.items())

    def span(self, content: int) -> Span:
        """Return the span that a content id stands for.

        :raises KeyError: if no prompt in flight has it.
        """
        return self._spans[content]

    @torch.inference_mode()
    def encode(self, span: Span) -> torch.Tensor:
        """Encode the span's images: [image tokens, hidden]."""
        self.encoder_runs += len(span.images)
        return torch.cat([self.family.encode(image) for image in span.images])


def take_images(store: ImageStore | None, token_ids: Ints, tensors: Tensors | None) -> ImagePrompt:
    """Convert a prompt, with or without images, to the engine's form.

    :param store: None if the model takes text only.
    :raises ChangeSomething: if it takes text only and there are images, or if these do not match
        the prompt.
    """
    if not tensors:
        return ImagePrompt(token_ids, ())
    if store is None:
        raise ChangeSomething(
            "images",
            ", ".join(tensors),
            "are given, but the model takes text only",
            "leave them out",
        )
    return store.take(token_ids, tensors)
