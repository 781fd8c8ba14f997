"""Images that come with a request: to tensors and back, and released with the request."""

import numpy as np
import pytest
import torch

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import SIZES, RequestSpec, SentTensor
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.running.sent_images import SentImages, tensor_of, to_sent
from kvell.errors import ChangeSomething
from kvell.models.images.image_families import PatchImages
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId
from tests.engine.seen import spans_of
from tests.engine.works import with_spec
from tests.models.pictures import PATCHES, Prompt, picture_module, pictured, text

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
