"""Images whose embeddings a request finds in the pool are not encoded again."""

import numpy as np
import pytest

from kvell.engine.planning.admission import embedded_images
from kvell.memory import GroupKind
from tests.models.pictures import PATCHES, ServedPictures, pictured, text
from tests.pages.pools import group, images, pool_of

GROUPS = pool_of(40, group(4, 2), images(GroupKind.VISION, 4, 2)).groups
IMAGES = ((3, 10, 10), (13, 4, 4), (20, 9, 9))


@pytest.mark.parametrize(("pages", "count"), [(0, 0), (3, 1), (4, 2), (7, 3)])
def test_images_count_while_all_their_pages_are_held(pages: int, count: int) -> None:
    """Images of three, one and three pages; pages of the text do not count."""
    rows = [(0, 0, p, p) for p in range(9)] + [(0, 1, p, p) for p in range(pages)]
    assert embedded_images(GROUPS, np.asarray(rows, np.int32), IMAGES) == count


def test_no_page_of_embeddings_no_image() -> None:
    assert embedded_images(GROUPS[:1], np.zeros((1, 4), np.int32), IMAGES) == 0


def test_an_image_that_is_behind_the_hit_is_behind_the_count() -> None:
    rows = np.asarray([(0, 1, 3, 8)], np.int32)
    assert embedded_images(GROUPS, rows, IMAGES) == 2


def test_a_second_request_about_an_image_runs_no_encoder() -> None:
    """Whatever text comes before it."""
    served = ServedPictures(PATCHES, batched=23)
    for seed in range(3):
        served.asked(f"q{seed}", pictured(PATCHES, text(5 + seed, seed), 0, text(9, seed)))
    assert served.store.encoder_runs == 1
    served.asked("other", pictured(PATCHES, text(4), 0, text(3), 1, text(2)))
    served.check()


def test_embeddings_that_were_evicted_are_made_again() -> None:
    large_bytes = ServedPictures(PATCHES).layout.large_page_bytes
    served = ServedPictures(PATCHES, kv_bytes=10 * large_bytes, max_model_len=160)
    for number, seed in enumerate((0, 1, 2, 0)):
        served.say(f"q{number}", pictured(PATCHES, text(9, number), seed, text(60, number)))
        served.run()
    assert served.store.encoder_runs == 4
    served.check()
