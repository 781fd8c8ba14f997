"""Images of a step: where embeddings are written; and those that come with a request."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import SIZES, RequestSpec, SentTensor, to_token_bytes
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, TokenWork
from kvell.engine.running.batching import PageTables
from kvell.engine.running.forward_batches import ImageBatcher, literal
from kvell.engine.running.sent_images import SentImages, tensor_of, to_sent
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, GroupSpec
from kvell.models.images.image_batch import ImageBatch
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_families import PatchImages
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId, StepNumber
from tests.engine.seen import spans_of
from tests.engine.works import with_spec, work_of
from tests.models.pictures import (
    CROSS,
    PATCHES,
    PREFIX,
    Prompt,
    ServedPictures,
    picture_module,
    pictured,
    text,
)

HANDLE, PAGE = 7, 4
CPU = torch.device("cpu")


def group(kind: GroupKind, holds_embeddings: bool = False) -> GroupSpec:
    spec = GroupSpec(str(kind), kind, (0,), 64, PAGE, 256, 2)
    return replace(spec, holds_embeddings=holds_embeddings)


def batcher(groups: Sequence[GroupSpec], store: ImageStore) -> ImageBatcher:
    """A batcher in which position p of the last group is page 10 + p; other groups are not read."""
    tables = PageTables(groups)
    rows = [(HANDLE, len(groups) - 1, p, 10 + p) for p in range(20)]
    tables.update(StepPlan(StepNumber(1), new_pages=np.asarray(rows, np.int32)))
    return ImageBatcher(groups, range(len(groups)), tables, store)


def store_of(architecture: str) -> ImageStore:
    return ServedPictures(architecture).store


def work_in(told: ImagePrompt, start: int, count: int, ids: NDArray[np.int32]) -> TokenWork:
    prompt = to_token_bytes(told.token_ids)
    spec = RequestSpec(RequestId("q"), prompt, SamplingParams(), images=told.images)
    return TokenWork(spec, HANDLE, start, count, ids, samples=False, output_index=0)


def work(store: ImageStore, prompt: Prompt, start: int, count: int) -> TokenWork:
    told = store.take(np.asarray(prompt.token_ids, np.int32), prompt.tensors)
    ids = told.token_ids[start : start + count]
    return work_in(told, start, count, ids)


def batch_of(
    architecture: str, prompt: Prompt, start: int, count: int, last: GroupSpec
) -> ImageBatch:
    store = store_of(architecture)
    batch = batcher((group(GroupKind.FULL), last), store).batch(
        [work(store, prompt, start, count)], CPU
    )
    assert batch is not None
    return batch


VISION = group(GroupKind.VISION)
TWO = pictured(PATCHES, text(3), 0, text(2), 1, text(4))
"""Two images of ten tokens, at 3 and at 15, in three pages each."""


def test_an_image_is_encoded_where_its_first_token_is_computed() -> None:
    begun = [
        [len(rows.page_ids) for _, rows in batch_of(PATCHES, TWO, start, 4, VISION).begun]
        for start in (0, 4, 12, 16)
    ]
    assert begun == [[10], [], [10], []]


def test_embeddings_lie_one_image_after_the_other_each_on_pages_of_its_own() -> None:
    batch = batch_of(PATCHES, TWO, 0, 29, VISION)
    pages = [rows.page_ids.tolist() for _, rows in batch.begun]
    assert pages == [[10] * 4 + [11] * 4 + [12] * 2, [13] * 4 + [14] * 4 + [15] * 2]
    assert batch.begun[1][1].offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_tokens_of_images_take_their_embeddings_wherever_a_chunk_begins() -> None:
    batch = batch_of(PATCHES, TWO, 10, 8, VISION)
    assert batch.rows.tolist() == [0, 1, 2, 5, 6, 7], "10 to 12, and 15 to 17"
    assert batch.embeddings.page_ids.tolist() == [11, 12, 12, 13, 13, 13]
    assert batch.embeddings.offsets.tolist() == [3, 0, 1, 0, 1, 2]


def test_embeddings_in_keys_and_values_lie_where_their_tokens_are() -> None:
    hosting = group(GroupKind.FULL, holds_embeddings=True)
    batch = batch_of(PATCHES, TWO, 14, 4, hosting)
    places = [p for _, rows in batch.begun for p in rows.page_ids.tolist()]
    assert places == [10 + position // PAGE for position in range(15, 25)]
    assert batch.embeddings.page_ids.tolist() == [13, 14, 14]
    assert batch.embeddings.offsets.tolist() == [3, 0, 1]


def test_text_among_the_placeholders_of_a_span_takes_nothing() -> None:
    prompt = pictured(PREFIX, text(2), 0, text(3))
    batch = batch_of(PREFIX, prompt, 0, 14, VISION)
    assert batch.rows.tolist() == list(range(2, 11))
    assert batch.embeddings.offsets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert batch.prefix_tokens == (14,)


def test_a_prompt_that_is_one_is_never_cut() -> None:
    with pytest.raises(RuntimeError, match="is cut after 9"):
        batch_of(PREFIX, pictured(PREFIX, 0, text(3)), 0, 9, VISION)


def test_what_follows_such_a_prompt_reads_backwards_only() -> None:
    store, prompt = store_of(PREFIX), pictured(PREFIX, 0, text(3))
    told = store.take(np.asarray(prompt.token_ids, np.int32), prompt.tensors)
    later = work_in(told, 12, 1, np.asarray([5], np.int32))
    batch = batcher((VISION,), store).batch([later], CPU)
    assert batch is not None
    assert (batch.prefix_tokens, batch.begun, len(batch.rows)) == ((0,), (), 0)


def test_each_token_that_sees_an_image_asks_for_all_of_it() -> None:
    prompt = pictured(CROSS, text(2), 2, text(3))
    batch = batch_of(CROSS, prompt, 0, 6, group(GroupKind.CROSS))
    [seen] = batch.seen
    assert seen.rows.tolist() == [2, 3, 4, 5]
    assert seen.batch.context_lens.tolist() == [15] * 4
    assert seen.batch.page_ids.tolist() == [10, 11, 12, 13] * 4
    assert seen.batch.table_starts.tolist() == [0, 4, 8, 12, 16]
    assert len(batch.rows) == 0, "the placeholder is a token of its own"


def test_the_second_of_two_images_side_by_side_is_seen_beside_the_first() -> None:
    batch = batch_of(CROSS, pictured(CROSS, 0, 2, text(2)), 0, 4, group(GroupKind.CROSS))
    assert [seen.rows.tolist() for seen in batch.seen] == [[0, 1, 2, 3], [1, 2, 3]]
    assert batch.seen[0].batch.context_lens.tolist() == [5, 15, 15, 15]
    assert batch.seen[1].batch.page_ids.tolist() == [10, 11] * 3


def test_ids_are_again_those_that_were_given() -> None:
    store = store_of(PATCHES)
    for start in (0, 5, 12, 20):
        one = work(store, TWO, start, 9)
        assert literal(one, store).tolist() == TWO.token_ids[start : start + 9]


def test_a_step_without_images_asks_for_nothing() -> None:
    plain = work_of("q", HANDLE, 0, 2, np.asarray([4, 5], np.int32))
    store = store_of(PATCHES)
    assert batcher((VISION,), store).batch([plain], CPU) is None
    assert literal(plain, store).tolist() == [4, 5]


NAME = RequestId("a")


def submit(prompt: Prompt) -> Submit:
    ids = np.asarray(prompt.token_ids, "<i4").tobytes()
    tensors = tuple(to_sent(name, tensor) for name, tensor in prompt.tensors.items())
    return Submit(RequestSpec(NAME, ids, SamplingParams(), tensors=tensors))


@pytest.fixture
def store() -> ImageStore:
    return ImageStore(PatchImages(picture_module(PATCHES)))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_tensors_come_as_they_were_sent(name: str, shape: tuple[int, ...]) -> None:
    dtype: torch.dtype = getattr(torch, name)
    tensor = (torch.arange(int(np.prod(shape, dtype=int))) % 2).to(dtype).reshape(shape)
    command = Submit(RequestSpec(NAME, b"", SamplingParams(), tensors=(to_sent("pixels", tensor),)))
    decoded = decode_command(encode_frame(command)[12:])
    assert isinstance(decoded, Submit)
    [told] = decoded.spec.tensors
    found = tensor_of(told)
    assert found.dtype == dtype and torch.equal(found, tensor)


@pytest.mark.parametrize(
    "wrong",
    [
        SentTensor("pixels", "float32", (2,), b"1234"),
        SentTensor("pixels", "object", (1,), b"1234"),
        SentTensor("pixels", "uint8", (-1, -4), b"1234"),
        SentTensor("pixels", "uint8", (1,) * 9, b"1"),
        SentTensor("pixels", "float32", (1 << 62, 4), b"1234"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(wrong: SentTensor) -> None:
    with pytest.raises(ChangeSomething, match=r"images\.pixels"):
        tensor_of(wrong)


def test_a_requests_images_are_known_until_it_is_over(store: ImageStore) -> None:
    images, prompt = SentImages(store), pictured(PATCHES, text(4), 0, text(3))
    told = images.take(submit(prompt))
    ids = np.frombuffer(told.spec.prompt, "<i4")
    [(start, tokens, count)] = told.spec.images
    content = int(ids[start + tokens - 1])
    assert content < 0 and count > 0 and not told.spec.tensors and store.knows([content])
    images.release_ended([Tokens(NAME, 0, 0, (1,)), Finished(RequestId("other"), 0, "stop")])
    assert store.knows([content])
    images.release_ended([Finished(NAME, 0, "cancelled")])
    assert not store.knows([content])
    images.release_ended([Finished(NAME, 0, "cancelled")])


def test_images_that_cannot_be_are_refused_and_leave_nothing(store: ImageStore) -> None:
    command = submit(pictured(PATCHES, text(4), 0, text(3)))
    with pytest.raises(ChangeSomething, match="text only"):
        SentImages(None).take(command)
    ids = np.asarray(text(9), "<i4").tobytes()
    with pytest.raises(ChangeSomething, match="that its images need"):
        SentImages(store).take(with_spec(command, prompt=ids))
    assert not spans_of(store)
