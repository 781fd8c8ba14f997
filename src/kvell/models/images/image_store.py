"""The images of requests in flight.

It stands beside an engine: commands name images by content, the runner asks here for what
they are.  What the encoder makes of them is kept in the pool and nowhere else.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from kvell.errors import ChangeSomething
from kvell.models.images.image_content import ContentIds, ImagePrompt, Ints, Span, Tensors
from kvell.models.images.image_families import ImageFamily
from kvell.models.images.image_tensors import require_no_films


class ImageStore:
    """Spans by id, counted by the prompts that use them.

    ::

        take ──► known ──release (as often as taken)──► forgotten, its id reserved

    :ivar encoder_runs: images that the encoder was run for, so far.
    """

    def __init__(self, family: ImageFamily) -> None:
        self.family = family
        self.encoder_runs = 0
        self._ids = ContentIds()
        self._spans: dict[int, Span] = {}
        self._users: Counter[int] = Counter()

    def take(self, token_ids: Ints, tensors: Tensors) -> ImagePrompt:
        """Know a prompt's images until :meth:`release`.

        :param token_ids: int32 [n], as the model's processor gives them.
        :param tensors: the processor's tensors for this prompt.
        :raises ChangeSomething: if prompt and tensors do not fit each other, or are of a film.
        """
        require_no_films(tensors)
        spans = self.family.spans(token_ids, self.family.images(tensors))
        told, rows = token_ids.copy(), []
        for start, span in spans:
            content = self._ids.id_of(span.digest)
            self._spans.setdefault(content, span)
            self._users[content] += 1
            told[start : start + len(span.token_ids)] = content
            if span.leads:  # embeddings are those of the images alone
                told[start : start + span.image_tokens] = self._ids.id_of(span.images_digest)
            rows.append((start, len(span.token_ids), span.image_tokens))
        return ImagePrompt(told, tuple(rows))

    def release(self, prompt: ImagePrompt) -> None:
        """The prompt's request is over; call it once for each :meth:`take`."""
        for start, tokens, _ in prompt.images:
            content = int(prompt.token_ids[start + tokens - 1])
            self._users[content] -= 1
            if not self._users[content]:
                del self._users[content], self._spans[content]

    def knows(self, contents: Sequence[int]) -> bool:
        """Are all these ids those of spans that were taken and not yet released?"""
        return all(content in self._spans for content in contents)

    def span(self, content: int) -> Span:
        """What an id in a prompt stands for.

        :raises KeyError: if no prompt in flight has it.
        """
        return self._spans[content]

    @torch.inference_mode()
    def encoded(self, span: Span) -> torch.Tensor:
        """What the encoder makes of the span's images, [image tokens, hidden]."""
        self.encoder_runs += len(span.images)
        return torch.cat([self.family.encode(image) for image in span.images])


def take_images(store: ImageStore | None, token_ids: Ints, tensors: Tensors | None) -> ImagePrompt:
    """A prompt as the engine takes it, with images or without.

    :param store: None if the model takes text only.
    :raises ChangeSomething: if it does and there are images, or if they do not fit the prompt.
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
