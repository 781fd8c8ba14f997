"""``kvell.memory``: the core as a library."""

import subprocess
import sys
import textwrap

import pytest

import kvell.memory
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, LayerSpec, create_core, plan_layout
from kvell.pages.layout import Layout
from kvell.prefix.compiled import CompiledCore
from kvell.prefix.core import ReferenceCore


@pytest.fixture
def layout() -> Layout:
    return plan_layout([LayerSpec(0, GroupKind.FULL, 1, 64, 2)], 1 << 20)


def test_the_example_in_its_docstring_runs() -> None:
    _, example = str(kvell.memory.__doc__).split("::\n", 1)
    exec(textwrap.dedent(example), {})


def test_every_name_it_promises_is_there() -> None:
    assert all(hasattr(kvell.memory, name) for name in kvell.memory.__all__)


def test_it_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, kvell.memory; print(*{'torch', 'transformers'} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == ""


def test_the_compiled_core_is_taken_where_it_was_built(layout: Layout) -> None:
    assert isinstance(create_core(layout), CompiledCore)
    assert isinstance(create_core(layout, "compiled"), CompiledCore)
    assert isinstance(create_core(layout, "python"), ReferenceCore)


def test_without_the_extension_python_serves_and_says_so(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvell.prefix.compiled", None)
    assert isinstance(create_core(layout), ReferenceCore)
    with pytest.raises(ChangeSomething, match="implementation=compiled: was not built"):
        create_core(layout, "compiled")


def test_an_unknown_implementation_is_refused(layout: Layout) -> None:
    with pytest.raises(ChangeSomething, match="use auto, compiled or python"):
        create_core(layout, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("implementation", ["compiled", "python"])
def test_a_core_knows_its_layout(
    layout: Layout, implementation: kvell.memory.Implementation
) -> None:
    assert create_core(layout, implementation).layout is layout
