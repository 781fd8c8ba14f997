"""Names of models: what ``--model`` says."""

from pathlib import Path

import pytest

from kvell.errors import ChangeSomething
from kvell.models.sources.named_sources import NamedSource, named_source, named_sources


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("smollm2", "smollm2", "smollm2"),
        ("owner/name", "owner/name", "owner/name"),
        ("small=owner/name", "small", "owner/name"),
        ("small=./some=dir", "small", "./some=dir"),
        ("./some=dir", "./some=dir", "./some=dir"),
        ("", "", ""),
    ],
)
def test_a_model_has_its_own_name_unless_it_is_given_one(text: str, name: str, source: str) -> None:
    assert named_source(text) == NamedSource(name, source)


def test_a_directory_that_is_there_is_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert named_source("a=b") == NamedSource("a=b", "a=b")


def test_every_name_once() -> None:
    assert [one.name for one in named_sources("a", ["b=a", "c=a"])] == ["a", "b", "c"]
    with pytest.raises(ChangeSomething, match="is the name of two models") as told:
        named_sources("a", ["b=x", "a=y"])
    assert (told.value.field, told.value.value) == ("model", "a")
