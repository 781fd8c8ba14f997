"""What the sources say of an object: docstrings, parameters, types as they are written."""

import ast
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

import kvell
from kvell.clock import Clock, VirtualClock
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, LayerSpec, MemoryCore, Tokens, create_core
from kvell.models.text.tokenizer import Tokenizer
from scripts.reference.python.aliases import alias_names, is_alias
from scripts.reference.python.annotations import assigned_type, linked, written_annotations
from scripts.reference.python.docstrings import (
    assigned_in,
    below_assignment,
    docstring,
    field_texts,
    parameter_texts,
    parameters,
    public_members,
)
from scripts.reference.python.pages import directive
from scripts.reference.python.public import PAGES, PUBLIC


def test_parameters_are_read_from_a_docstring_in_a_class() -> None:
    text = """A thing.

    Words.

    :param first: one line.
    :param second: a line
        and another.
    :ivar third: kept.
    :raises ValueError: if not.
    """
    expected = {"first": "one line.", "second": "a line and another.", "third": "kept."}
    assert parameter_texts(text) == expected


def test_texts_below_fields_are_those_of_a_class_and_what_it_extends() -> None:
    texts = field_texts(EngineSettings)
    assert texts["dtype"].startswith("Dtype of weights and activations")
    assert texts["kv_memory_bytes"].startswith("Size of the KV pool")
    assert field_texts(VirtualClock) == {} == field_texts(parameters)


def test_texts_below_assignments_are_found_where_others_import_from() -> None:
    assert assigned_in("kvell.memory", "Manager") == "kvell.pages.sizing"
    assert below_assignment("kvell.memory", "Manager").startswith("Configurations of the one")
    assert docstring("kvell.memory.Tokens") == docstring("tests.oracle.index.radix.Tokens") != ""
    assert below_assignment("kvell.pages.layout", "CROSS", "GroupKind").startswith("Text attends")
    assert below_assignment("kvell.memory", "np") == ""


def test_only_what_somebody_can_give_is_a_parameter() -> None:
    def function(a: int, *others: int, b: int = 0, **more: int) -> None: ...

    assert parameters(function) == ["a", "b", "more"]
    assert parameters(ChangeSomething) == ["field", "value", "problem", "remedy", "bound"]
    assert parameters(TokenLogprobs) == ["logprob", "rank", "top"]
    assert parameters(VirtualClock) == ["start_seconds"]
    for without in (GroupKind, MemoryCore, Clock, kvell.errors.KvellError):
        assert parameters(without) == []


def test_members_are_a_class_s_own_functions_and_properties() -> None:
    assert list(public_members(VirtualClock)) == ["now_seconds", "advance"]
    assert {"token_bytes"} == set(public_members(LayerSpec))
    assert "load" in public_members(Tokenizer)


KNOWN = {
    "Sequence": Sequence,
    "npt": npt,
    "np": np,
    "Any": Any,
    "LayerSpec": LayerSpec,
    "Tokens": Tokens,
    "Literal": Literal,
}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("int | None", "int | None"),
        ("Sequence[LayerSpec]", "~collections.abc.Sequence[kvell.pages.layout.LayerSpec]"),
        ("Tokens | None", "kvell.memory.Tokens | None"),
        ("'tuple[LayerSpec, ...]'", "tuple[kvell.pages.layout.LayerSpec, ...]"),
        ("npt.NDArray[np.int32]", "~numpy.typing.NDArray[~numpy.int32]"),
        ("Literal['a', 'LayerSpec']", "~typing.Literal['a', 'LayerSpec']"),
        ("Unknown", "Unknown"),
    ],
)
def test_names_in_annotations_become_full_ones(written: str, expected: str) -> None:
    assert linked(ast.parse(written, mode="eval").body, KNOWN) == expected


def test_types_are_those_of_the_source() -> None:
    generate = written_annotations(kvell.LLM.generate)
    assert generate["prompts"] == "kvell.llm.Prompt | ~collections.abc.Sequence[kvell.llm.Prompt]"
    assert generate["return"] == "list[kvell.local.outputs.RequestOutput]"
    assert written_annotations(MemoryCore.open)["tokens"] == "kvell.memory.Tokens"
    assert written_annotations(create_core)["eviction"] == "kvell.memory.Eviction"


def test_fields_have_types_too() -> None:
    assert written_annotations(LayerSpec)["kind"] == "kvell.pages.layout.GroupKind"
    assert written_annotations(TokenLogprobs)["top"] == "tuple[tuple[int, float], ...]"
    assert written_annotations(kvell.LLM)["incarnation"] == "int"
    assert "return" not in written_annotations(kvell.LLM)
    assert written_annotations(GroupKind) == {}


def test_aliases_are_told_from_classes_and_values() -> None:
    assert is_alias(Tokens)
    assert is_alias(kvell.llm.Prompt)
    assert is_alias(kvell.vocabulary.RequestId)
    assert not is_alias(LayerSpec)
    assert not is_alias(kvell.memory.MANAGERS)
    assert alias_names()["Prompt", id(kvell.llm.Prompt)] == "kvell.llm.Prompt"
    assert alias_names()["Prompt", id(kvell.async_engine.Prompt)] == "kvell.async_engine.Prompt"


def test_an_alias_is_shown_as_it_was_assigned() -> None:
    assert assigned_type("kvell.memory.Tokens") == "~numpy.typing.NDArray[~numpy.int32]"
    assert assigned_type("kvell.memory.Eviction") == "~typing.Literal['lru', 'hazard']"
    with pytest.raises(LookupError, match="assigns no nothing"):
        assigned_type("kvell.memory.nothing")


@pytest.mark.parametrize(
    ("name", "first_lines"),
    [
        ("kvell.LLM", [".. autoclass:: kvell.LLM"]),
        ("kvell.memory.create_core", [".. autofunction:: kvell.memory.create_core"]),
        ("kvell.errors.TryLater", [".. autoexception:: kvell.errors.TryLater"]),
        (
            "kvell.memory.VisibleCore",
            [".. autoclass:: kvell.memory.VisibleCore", "   :show-inheritance:"],
        ),
        (
            "kvell.memory.EVICTIONS",
            [
                ".. py:data:: EVICTIONS",
                "   :module: kvell.memory",
                "   :value: ('lru', 'hazard')",
                "",
                "   All rules of eviction.",
            ],
        ),
        (
            "kvell.vocabulary.RequestId",
            [".. py:type:: RequestId", "   :module: kvell.vocabulary", "   :canonical: str"],
        ),
    ],
)
def test_each_kind_of_object_has_its_directive(name: str, first_lines: list[str]) -> None:
    assert directive(name).splitlines()[: len(first_lines)] == first_lines


def test_a_name_is_on_one_page_only() -> None:
    assert len(PUBLIC) == len(set(PUBLIC)) > 80
    assert len({one.name for one in PAGES}) == len(PAGES)
