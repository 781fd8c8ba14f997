"""The marks of a gap in a text: by whole sets, and in the order of each family."""

import numpy as np
import pytest

from kvell.models.text.gap_tokens import gap_tokens

QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MISTRAL = ["[SUFFIX]", "[PREFIX]"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (QWEN, [0, 50, 51, 1, 60, 2]),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], [0, 50, 51, 1, 60, 2]),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], [0, 50, 51, 1, 60, 2]),
        (MISTRAL, [0, 60, 1, 50, 51]),
    ],
)
def test_texts_and_marks_are_in_the_familys_order(names: list[str], expected: list[int]) -> None:
    ids = {name: index for index, name in enumerate([*names, "<|endoftext|>"])}
    form = gap_tokens(ids.get)
    assert form is not None
    prompt = form.prompt(np.array([50, 51], np.int32), np.array([60], np.int32))
    assert prompt.tolist() == expected and prompt.dtype == np.int32
    assert form.end_token_ids == tuple(range(len(names) + 1))


@pytest.mark.parametrize("names", [[], QWEN[:2], [*QWEN[:2], "<fim_middle>"], MISTRAL[:1]])
def test_a_part_of_the_marks_is_none(names: list[str]) -> None:
    assert gap_tokens({name: index for index, name in enumerate(names)}.get) is None
