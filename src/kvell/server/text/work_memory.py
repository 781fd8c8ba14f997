"""The front's largest working set for texts and pictures, for its memory contract."""

from collections.abc import Sequence

from kvell.engine.protocol.statistics import InstanceFacts
from kvell.models.images.picture_files import MEMORY_PER_PIXEL, MOST_PIXELS
from kvell.models.images.processor import MOST_TENSOR_BYTES
from kvell.server.text.answer_memory import MOST_KEPT_BYTES
from kvell.server.text.held_tensors import MOST_HELD_BYTES
from kvell.server.text.text_bounds import TextBounds
from kvell.server.text.text_model import TextModel

PICTURE_BYTES = MEMORY_PER_PIXEL * MOST_PIXELS + 2 * MOST_HELD_BYTES + MOST_TENSOR_BYTES
"""The most memory for decoding one request's pictures and for the tensors of all requests."""


def most_work_bytes(facts: InstanceFacts, first: TextModel, beside: Sequence[TextModel]) -> int:
    """Return the largest working set for texts, pictures and kept answers.

    :param facts: of an instance, on its first model and the other models.
    """
    models = [
        (first, facts.lengths().longest_tokens),
        *((model, facts.lengths(model.name).longest_tokens) for model in beside),
    ]
    texts_bytes = max(
        TextBounds(max_model_len, model.most_token_bytes).memory_bytes
        for model, max_model_len in models
    )
    if any(model.takes_images for model, _ in models):
        # The thread of pictures encodes their text.
        texts_bytes = 2 * texts_bytes + PICTURE_BYTES
    return texts_bytes + MOST_KEPT_BYTES
