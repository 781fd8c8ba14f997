import pytest

from kvell.errors import ChangeSomething
from kvell.models.families.families import EXACT, WITH_IMAGES, family_names, require_exact
from tests.cli.conftest import Kvell


def test_all_are_listed(kvell: Kvell) -> None:
    ended = kvell("plan", "--families")
    assert ended.code == 0
    assert " ".join(ended.stdout.split()) == ", ".join(family_names())
    assert all(len(line) < 80 for line in ended.stdout.splitlines())


def test_a_name_is_a_class_without_its_end() -> None:
    names = family_names()
    assert len(names) == len(EXACT | WITH_IMAGES.keys())
    assert {"Llama", "Qwen3", "Gemma3", "PaliGemma"} <= set(names)


def test_a_refused_model_is_told_their_names() -> None:
    with pytest.raises(ChangeSomething) as caught:
        require_exact("FrobnicatorForCausalLM")
    assert caught.value.remedy == f"use one of {', '.join(family_names())}"
