"""The most memory that reading texts and pictures takes of the front, for its contract."""

from collections.abc import Sequence

from kvell.engine.protocol.messages import Ready
from kvell.models.images.picture_files import MEMORY_PER_PIXEL, MOST_PIXELS
from kvell.models.images.processor import MOST_TENSOR_BYTES
from kvell.server.text.held_tensors import MOST_HELD_BYTES
from kvell.server.text.lanes import MOST_TOLD_BYTES
from kvell.server.text.text_bounds import TextBounds
from kvell.server.text.text_model import TextModel

PICTURE_BYTES = MEMORY_PER_PIXEL * MOST_PIXELS + MOST_HELD_BYTES + MOST_TENSOR_BYTES
"""Of one request's pictures while they are read, and of the tensors that requests keep."""


def most_work_bytes(ready: Ready, first: TextModel, beside: Sequence[TextModel]) -> int:
    """The most bytes for texts and pictures that are read at once, of a server's models.

    Log probabilities that answers keep are among them.

    :param ready: what the instance says of its first model and of those beside it.
    """
    models = [(first, ready.longest_tokens), *((one, ready.beside[one.name]) for one in beside)]
    texts_bytes = max(
        TextBounds(max_model_len, one.most_token_bytes).memory_bytes
        for one, max_model_len in models
    )
    if any(one.takes_images for one, _ in models):
        # The text beside pictures is read in their thread.
        texts_bytes = 2 * texts_bytes + PICTURE_BYTES
    return texts_bytes + MOST_TOLD_BYTES
