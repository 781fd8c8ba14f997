"""``kvell.LLM`` with images: what a model's processor makes goes in as it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvell import LLM
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.vocabulary import MIB
from tests.engine.seen import spans_of
from tests.models.pictures import (
    CROSS,
    EVERY,
    GRIDS,
    Prompt,
    oracle,
    picture_module,
    pictured,
    text,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

SOON = (CROSS, GRIDS)
"""Images beside the text, and in it; `tests/models` has all of them."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in SOON else pytest.mark.long) for one in EVERY],
)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(architecture: str, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> LLM:
    """From a directory, as users have it; the tokenizer is another model's."""
    path = tmp_path_factory.mktemp("model") / architecture
    picture_module(architecture).save_pretrained(path)
    for file in smollm2_path.glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return LLM(str(path), kv_memory_bytes=8 * MIB, dtype="float32", max_model_len=256)


def asked(prompt: Prompt) -> dict[str, Any]:
    return {"prompt_token_ids": prompt.token_ids, "images": prompt.tensors}


def greedy(architecture: str, prompt: Prompt, count: int) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        output.append(int(oracle(architecture, prompt, output)[-1].argmax()))
    return output


def test_answers_about_images_are_transformers(llm: LLM, architecture: str) -> None:
    prompts = [
        pictured(architecture, text(7), 0, text(9)),
        Prompt(text(12)),
        pictured(architecture, 1, text(5), 2, text(3)),
    ]
    many: list[Any] = [asked(p) if p.tensors else p.token_ids for p in prompts]
    outputs = llm.generate(many, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt.token_ids, "as they were given"
        assert output.token_ids == greedy(architecture, prompt, 6)


def test_images_are_forgotten_when_the_answers_are_there(llm: LLM, architecture: str) -> None:
    assert llm.engine.images is not None
    llm.generate(asked(pictured(architecture, text(7), 3, text(9))), GREEDY)
    "".join(llm.stream(asked(pictured(architecture, text(7), 3, text(9))), GREEDY))
    assert not spans_of(llm.engine.images)


def test_a_prompt_that_does_not_fit_its_images_is_refused(llm: LLM, architecture: str) -> None:
    prompt = asked(pictured(architecture, text(7), 0))
    with pytest.raises(ChangeSomething, match="that its images need"):
        llm.generate([prompt, prompt | {"prompt_token_ids": text(9)}], GREEDY)
    assert llm.engine.images is not None
    assert not spans_of(llm.engine.images)
    assert not llm.engine.has_work()


def test_several_answers_to_one_image(llm: LLM, architecture: str) -> None:
    prompt = asked(pictured(architecture, text(9), 0, text(4)))
    sampling = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, n=3, seed=5)
    [output] = llm.generate(prompt, sampling)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3


def ids_of(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.asarray(ids, np.int32)


def test_a_model_of_text_refuses_images(smollm2_path: Path) -> None:
    llm = LLM(str(smollm2_path), kv_memory_bytes=32 * MIB, max_model_len=64)
    with pytest.raises(ChangeSomething, match="text only"):
        llm.generate(
            {"prompt_token_ids": ids_of([4, 5]), "images": {"pixel_values": torch.ones(1)}}
        )


def test_an_image_of_another_model_is_named(llm: LLM, architecture: str) -> None:
    prompt = pictured(architecture, text(7), 0)
    with pytest.raises(ChangeSomething, match=r"images\.pixel_values"):
        llm.generate(asked(Prompt(prompt.token_ids, {"images": torch.ones(1)})), GREEDY)


def test_texts_alone_have_vectors_and_images_are_refused_by_name(
    llm: LLM, architecture: str
) -> None:
    texts = [text(12), text(70, 3)]
    for output, ids in zip(llm.embed(texts), texts, strict=True):
        with torch.no_grad():
            told = picture_module(architecture).model(input_ids=torch.tensor([ids]))
        expected = torch.nn.functional.normalize(told.last_hidden_state[0, -1], dim=0)
        assert np.allclose(output.embedding, expected.numpy(), atol=1e-5)
    with pytest.raises(ChangeSomething) as caught:
        llm.embed(asked(pictured(architecture, text(7), 0, text(9))))
    assert caught.value.field == "images"
