"""Tokenizers that a thread loads beside the weights."""

import threading
from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.models.loading.named_models import NamedModel
from kvell.models.text import early_tokenizer
from kvell.models.text.early_tokenizer import wait_until_loaded
from kvell.models.text.tokenizer import NoTokenizer, Tokenizer


def test_it_is_the_tokenizer_of_a_first_use(smollm2_path: Path) -> None:
    early = NamedModel("m", smollm2_path).with_early_tokenizer()
    usual = NamedModel("m", smollm2_path).tokenizer
    assert early.tokenizer is early.tokenizer
    assert (early.tokenizer.encode("Hello") == usual.encode("Hello")).all()
    assert early.eos_token_ids == usual.eos_token_ids


def test_its_use_waits_and_so_does_who_imports_modelling_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, events = threading.Event(), list[str]()

    def load(path: Path, overrides: str | None) -> Tokenizer:
        assert threading.current_thread() is not threading.main_thread()
        goes_on.wait()
        events.append("loaded")
        return NoTokenizer(path, overrides)

    def wait() -> None:
        wait_until_loaded()
        events.append("imported")

    monkeypatch.setattr(early_tokenizer, "tokenizer_or_none", load)
    (tmp_path / "config.json").write_text("{}")
    early = NamedModel("m", tmp_path).with_early_tokenizer()
    other = threading.Thread(target=wait)
    other.start()
    goes_on.set()
    assert isinstance(early.tokenizer, NoTokenizer)
    other.join()
    assert events == ["loaded", "imported"]


def test_errors_come_where_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    early = NamedModel("m", tmp_path).with_early_tokenizer()
    wait_until_loaded()
    for _ in range(2):
        with pytest.raises(ChangeSomething, match="is not valid JSON"):
            _ = early.tokenizer
