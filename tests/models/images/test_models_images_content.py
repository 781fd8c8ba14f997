"""Images by content: ids, spans of a prompt, and the store that knows what they stand for."""

import numpy as np
import pytest
import torch

from kvell.errors import ChangeSomething
from kvell.models.images.image_content import ContentIds, Image, Ints, Span
from kvell.models.images.image_families import FAMILIES
from kvell.models.images.image_store import ImageStore, take_images
from tests.models.pictures import (
    CROSS,
    EVERY,
    GRIDS,
    GRIDS_2_5,
    KINDS,
    PATCHES,
    PIECES,
    PREFIX,
    Prompt,
    picture_module,
    pictured,
    text,
)

every_family = pytest.mark.parametrize("architecture", EVERY)


def store_of(architecture: str) -> ImageStore:
    return ImageStore(FAMILIES[KINDS[architecture]](picture_module(architecture)))


def ids_of(prompt: Prompt) -> Ints:
    return np.asarray(prompt.token_ids, np.int32)


def test_equal_tensors_have_equal_digests_and_others_do_not() -> None:
    pixels = torch.arange(12.0).view(3, 4)
    known = Image({"pixel_values": pixels}, 2).digest
    assert Image({"pixel_values": pixels.clone()}, 2).digest == known
    assert Image({"pixel_values": pixels.t().contiguous().t()}, 2).digest == known
    others = (pixels + 1, pixels.view(4, 3), pixels.double(), pixels.bfloat16())
    assert len({known, *(Image({"pixel_values": other}, 2).digest for other in others)}) == 5
    assert Image({"pixels": pixels}, 2).digest != known


def test_a_span_is_its_ids_and_its_images() -> None:
    images = [Image({"pixel_values": torch.full((2,), float(i))}, 2) for i in range(2)]
    spans = [
        Span(np.asarray(ids, np.int32), tuple(images[i] for i in own), 9)
        for ids, own in (([9, 9], [0]), ([9, 9], [1]), ([9, 9, 4], [0]), ([9, 9, 9, 9], [0, 1]))
    ]
    assert len({span.digest for span in spans}) == 4
    assert [span.image_tokens for span in spans] == [2, 2, 2, 4]


def test_placeholders_are_counted_where_they_stand() -> None:
    span = Span(np.asarray([9, 9, 4, 9, 5], np.int32), (), 9)
    assert span.image_indices.tolist() == [0, 1, -1, 2, -1]


def test_ids_of_contents_are_negative_and_never_shared() -> None:
    """Digests that begin alike are told apart, however many come."""
    ids = ContentIds()
    digests = [b"\xff\xff\xff\xff" + bytes([i]) * 12 for i in range(50)]
    given = [ids.id_of(digest) for digest in digests]
    assert len(set(given)) == 50
    assert all(-(1 << 31) <= content < 0 for content in given)
    assert [ids.id_of(digest) for digest in digests[::-1]] == given[::-1]


@every_family
def test_what_stands_in_a_prompt_for_its_images(architecture: str) -> None:
    prompt = pictured(architecture, text(5), 0, text(7), 2, text(3))
    told = store_of(architecture).take(ids_of(prompt), prompt.tensors)
    inside = np.zeros(len(told.token_ids), bool)
    for start, tokens, _ in told.images:
        inside[start : start + tokens] = True
    assert np.array_equal(inside, told.token_ids < 0)
    assert np.array_equal(told.token_ids[~inside], ids_of(prompt)[~inside])
    expected = {
        PATCHES: ((5, 10, 10), (22, 10, 10)),
        CROSS: ((5, 1, 5), (13, 1, 15)),
        PREFIX: ((0, 33, 18),),
        PIECES: ((5, 4, 4), (16, 4, 4)),
        GRIDS: ((5, 6, 6), (19, 4, 4)),
        GRIDS_2_5: ((5, 6, 6), (19, 4, 4)),
    }
    assert told.images == expected[architecture]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_an_image_are_counted_as_transformers_makes_them(seed: int) -> None:
    store, prompt = store_of(PATCHES), pictured(PATCHES, seed)
    [image] = store.family.read_images(prompt.tensors)
    with torch.inference_mode():
        assert store.family.encode(image).shape == (image.tokens, 48)


@every_family
def test_a_prompt_without_its_placeholders_is_refused(architecture: str) -> None:
    prompt = pictured(architecture, text(5), 0)
    with pytest.raises(ChangeSomething, match=r"prompt=.*its images need"):
        store_of(architecture).take(np.delete(ids_of(prompt), 5), prompt.tensors)


def test_text_among_the_tokens_of_an_image_is_refused() -> None:
    prompt = pictured(PATCHES, text(5), 0)
    ids = ids_of(prompt)
    ids[[4, 6]] = ids[[6, 4]]
    with pytest.raises(ChangeSomething, match="keep them together"):
        store_of(PATCHES).take(ids, prompt.tensors)


@every_family
def test_a_missing_or_misshapen_tensor_is_named(architecture: str) -> None:
    store, prompt = store_of(architecture), pictured(architecture, 0, 1)
    for name in prompt.tensors:
        rest = {key: tensor for key, tensor in prompt.tensors.items() if key != name}
        with pytest.raises(ChangeSomething, match=f"images.{name}"):
            store.take(ids_of(prompt), rest)
        with pytest.raises(ChangeSomething, match=f"images.{name}"):
            store.take(ids_of(prompt), rest | {name: prompt.tensors[name][0, 0]})


@pytest.mark.parametrize(("architecture", "name"), [(PATCHES, "image_sizes")])
def test_tensors_of_unlike_numbers_of_images_are_refused(architecture: str, name: str) -> None:
    prompt = pictured(architecture, 0, 1)
    prompt.tensors[name] = prompt.tensors[name][:1]
    with pytest.raises(ChangeSomething, match=f"images.{name}"):
        store_of(architecture).take(ids_of(prompt), prompt.tensors)


def test_tiles_of_unlike_numbers_of_images_are_refused() -> None:
    prompt = pictured(CROSS, 0, 1)
    prompt.tensors["aspect_ratio_mask"] = prompt.tensors["aspect_ratio_mask"][:, :1]
    with pytest.raises(ChangeSomething, match="is not of 2 images"):
        store_of(CROSS).take(ids_of(prompt), prompt.tensors)


def test_pieces_that_are_not_of_the_encoders_size_are_refused() -> None:
    prompt = pictured(PIECES, 0)
    prompt.tensors["pixel_values"] = prompt.tensors["pixel_values"][..., :24]
    with pytest.raises(ChangeSomething, match=r"images.pixel_values=.*not of \(32, 32\) pixels"):
        store_of(PIECES).take(ids_of(prompt), prompt.tensors)


def test_a_grid_that_its_patches_do_not_fill_is_refused() -> None:
    prompt = pictured(GRIDS, 0, 1)
    prompt.tensors["pixel_values"] = prompt.tensors["pixel_values"][:-4]
    with pytest.raises(ChangeSomething, match=r"images.pixel_values=.*not of 40 patches"):
        store_of(GRIDS).take(ids_of(prompt), prompt.tensors)


@pytest.mark.parametrize("grid", [[1, 5, 4], [1, 4, 0], [2, 2, 4], [1, 4, 6, 1]])
def test_grids_that_are_no_image_are_refused(grid: list[int]) -> None:
    """A side that is half a token, an empty one, a film, and something else."""
    prompt = pictured(GRIDS, 0)
    prompt.tensors["image_grid_thw"] = torch.tensor([grid])
    with pytest.raises(ChangeSomething, match=r"images.image_grid_thw=.*multiples of 2"):
        store_of(GRIDS).take(ids_of(prompt), prompt.tensors)


def test_a_grid_that_is_larger_than_the_room_for_its_encoder_is_refused() -> None:
    prompt = pictured(GRIDS, 0)
    prompt.tensors["image_grid_thw"] = torch.tensor([[1, 128, 130]])
    with pytest.raises(ChangeSomething, match=r"4160 tokens.*encoding 4096.*max_pixels"):
        store_of(GRIDS).take(ids_of(prompt), prompt.tensors)


def test_equal_patches_in_another_grid_are_another_image() -> None:
    prompt, told = pictured(GRIDS, 0), []
    for grid in ([1, 4, 6], [1, 6, 4]):
        prompt.tensors["image_grid_thw"] = torch.tensor([grid])
        told.append(store_of(GRIDS).take(ids_of(prompt), prompt.tensors).token_ids[0])
    assert told[0] != told[1]


@every_family
def test_a_film_is_refused_by_the_name_of_its_tensor(architecture: str) -> None:
    prompt = pictured(architecture, 0)
    film = {"pixel_values_videos": torch.zeros(2, 3)}
    with pytest.raises(ChangeSomething, match=r"pixel_values_videos=\(2, 3\): is of a video"):
        store_of(architecture).take(ids_of(prompt), prompt.tensors | film)


def test_a_picture_with_too_few_pieces_is_refused() -> None:
    prompt = pictured(PATCHES, 0)
    prompt.tensors["pixel_values"] = prompt.tensors["pixel_values"][:, :2]
    with pytest.raises(ChangeSomething, match="hold no 5 pieces"):
        store_of(PATCHES).take(ids_of(prompt), prompt.tensors)


def test_what_is_taken_is_known_until_all_have_released_it() -> None:
    store, prompt = store_of(PATCHES), pictured(PATCHES, text(5), 0)
    first, second = (store.take(ids_of(prompt), prompt.tensors) for _ in range(2))
    assert np.array_equal(first.token_ids, second.token_ids)
    content = int(first.token_ids[-1])
    store.release(first)
    assert store.knows([content])
    assert store.span(content).image_tokens == 51
    store.release(second)
    assert not store.knows([content])
    with pytest.raises(KeyError):
        store.span(content)


def test_a_model_of_text_takes_no_images() -> None:
    ids = np.asarray([4, 5], np.int32)
    assert take_images(None, ids, None).images == ()
    with pytest.raises(ChangeSomething, match="text only"):
        take_images(None, ids, {"pixel_values": torch.zeros(1)})
