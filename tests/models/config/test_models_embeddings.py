"""What model directories say of their embeddings: sentence-transformers' files, and sizes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvell.errors import ChangeSomething
from kvell.models.config.embeddings import EmbeddingFacts, embedding_facts

CONFIG = SimpleNamespace(hidden_size=64)
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
LAST = {
    "word_embedding_dimension": 64,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def directory(path: Path, modules: Any, pooling: Any = None) -> Path:
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_a_model_that_says_nothing_gives_the_vector_of_the_last_token(tmp_path: Path) -> None:
    facts = embedding_facts(tmp_path, CONFIG)
    assert facts == EmbeddingFacts(64)
    facts.require_served("m")


@pytest.mark.parametrize(
    "pooling",
    [LAST, {"pooling_mode": "lasttoken"}, {"pooling_mode": ["lasttoken"], "include_prompt": True}],
)
@pytest.mark.parametrize("modules", [[TRANSFORMER, POOLING], [TRANSFORMER, POOLING, NORMALIZE]])
def test_a_model_that_pools_its_last_token_is_served(
    tmp_path: Path, modules: Any, pooling: Any
) -> None:
    assert embedding_facts(directory(tmp_path, modules, pooling), CONFIG) == EmbeddingFacts(64)


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        (
            [TRANSFORMER, POOLING],
            LAST | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False},
            "pools mean_tokens (1_Pooling/config.json)",
        ),
        ([POOLING], LAST | {"pooling_mode_cls_token": True}, "pools cls_token, lasttoken"),
        ([POOLING], {"pooling_mode": "weightedmean"}, "pools weightedmean"),
        ([POOLING], {}, "pools nothing"),
        ([POOLING], None, "pools nothing"),
        ([TRANSFORMER, POOLING, DENSE], LAST, "puts a module 'Dense'"),
        ([{"idx": 0}], None, "puts a module ''"),
    ],
)
def test_others_are_refused_by_name(
    tmp_path: Path, modules: Any, pooling: Any, problem: str
) -> None:
    facts = embedding_facts(directory(tmp_path, modules, pooling), CONFIG)
    with pytest.raises(ChangeSomething) as caught:
        facts.require_served("m")
    assert (caught.value.field, caught.value.value) == ("model", "m")
    assert problem in caught.value.problem


@pytest.mark.parametrize("text", ["[", '{"a": 1}', "[1]", '"x"'])
def test_a_damaged_file_keeps_no_model_from_writing_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    facts = embedding_facts(tmp_path, CONFIG)
    with pytest.raises(ChangeSomething, match=r"has no embeddings while modules\.json"):
        facts.require_served("m")


def test_a_path_in_the_file_leads_nowhere_else(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    directory(tmp_path, [], LAST)
    facts = embedding_facts(
        directory(inside, [POOLING | {"path": "../../1_Pooling"}], None), CONFIG
    )
    assert "pools nothing" in facts.problem


def test_the_size_is_that_of_the_text(tmp_path: Path) -> None:
    nested = SimpleNamespace(text_config=SimpleNamespace(hidden_size=48), hidden_size=7)
    assert embedding_facts(tmp_path, nested).size == 48


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        ({}, [None, 64], [1, 32, 63, 65]),
        ({"is_matryoshka": True}, [None, 64, 1, 32], [0, 65, -1]),
        ({"matryoshka_dimensions": [16, 32]}, [None, 64, 16, 32], [8, 65]),
        ({"is_matryoshka": False, "matryoshka_dimensions": None}, [None, 64], [32]),
    ],
)
def test_vectors_are_cut_where_the_model_was_trained_for_it(
    tmp_path: Path, fields: dict[str, Any], allowed: list[int | None], refused: list[int]
) -> None:
    facts = embedding_facts(tmp_path, SimpleNamespace(hidden_size=64, **fields))
    for dimensions in allowed:
        assert facts.checked_size(dimensions) == (dimensions or 64)
    for dimensions in refused:
        with pytest.raises(ChangeSomething) as caught:
            facts.checked_size(dimensions)
        assert (caught.value.field, caught.value.value) == ("dimensions", dimensions)
        assert caught.value.remedy
