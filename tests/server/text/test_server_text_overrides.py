"""``--hf-overrides`` on the text side: a front reads the config that its instances read."""

import json
import shutil
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.models.families.draft_model import check_draft
from kvell.models.loading.named_models import NamedModel
from kvell.models.sources.progress import quiet
from kvell.models.text.tokenizer import tokenizer_or_none
from kvell.server.text.named_texts import texts_of

OVERRIDES = json.dumps({"vocab_size": 49_200, "eos_token_id": 7})


@pytest.fixture
def model(smollm2_path: Path, tmp_path: Path) -> Path:
    """A directory without recommended ends of a text, so that those of its config count."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_path / name, tmp_path)
    return tmp_path


def test_the_first_models_text_follows_its_overrides(model: Path, smollm2_path: Path) -> None:
    models = f"one={model}", f"two={smollm2_path}"
    first, other = texts_of(models, model, quiet, hf_overrides=OVERRIDES).load().models
    assert (first.vocab_size, other.vocab_size) == (49_200, 49_152)
    assert 7 in first.eos_token_ids and 7 not in other.eos_token_ids


def test_ends_of_a_text_follow_overrides_with_a_tokenizer_and_without(model: Path) -> None:
    named, plain = NamedModel("m", model, OVERRIDES), NamedModel("m", model)
    assert 7 in named.eos_token_ids and 7 in named.tokenizer.eos_token_ids
    assert 7 not in plain.eos_token_ids
    (model / "tokenizer.json").unlink()
    assert tokenizer_or_none(model, OVERRIDES).eos_token_ids == {7}
    (model / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert tokenizer_or_none(model, OVERRIDES).eos_token_ids == {9}


def test_a_tokenizer_may_be_elsewhere(model: Path, smollm2_path: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    named, other = f"one={model}", f"two={smollm2_path}"
    first, _ = texts_of((named, other), model, quiet, tokenizer=str(smollm2_path)).load().models
    own, apart = tokenizer_or_none(smollm2_path), NamedModel("m", model, None, smollm2_path)
    assert first.eos_token_ids == own.eos_token_ids == apart.eos_token_ids
    assert apart.tokenizer.encode("a page").tolist() == own.encode("a page").tolist()
    assert apart.tokenizer_json() == (smollm2_path / "tokenizer.json").read_text()


def test_a_tokenizer_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(ChangeSomething, match=r"^tokenizer=/none: there is no such directory"):
        texts_of((str(model),), model, quiet, tokenizer="/none")


def test_a_draft_model_is_compared_with_the_overridden_config(model: Path) -> None:
    tokenizer = tokenizer_or_none(model)
    check_draft(model, model, tokenizer, "draft")
    with pytest.raises(ChangeSomething, match="the model one of 49200"):
        check_draft(model, model, tokenizer, "draft", OVERRIDES)
