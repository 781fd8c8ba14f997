"""``kvell.memory``: the core as a library."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvell.memory
from kvell.errors import ChangeSomething
from kvell.memory import (
    MAX_REGISTERED_PADDING,
    GroupKind,
    LayerSpec,
    MemoryCore,
    audit,
    create_core,
    plan_layout,
    register,
)
from kvell.pages.layout import Layout

PAGE = Path(__file__).parents[3] / "docs" / "memory-library.md"
MOST_EXAMPLE_LINES = 30


def example() -> str:
    _, after = str(kvell.memory.__doc__).split("::\n", 1)
    indented = re.match(r"(?:\n|    .*\n)+", after)
    assert indented is not None
    return textwrap.dedent(indented[0]).strip() + "\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def layout() -> Layout:
    return plan_layout([LayerSpec(0, GroupKind.FULL, 1, 64, 2)], 1 << 20)


@pytest.fixture
def core(layout: Layout) -> MemoryCore:
    return create_core(layout)


def test_its_example_is_short_and_runs_without_torch() -> None:
    code = example()
    assert 15 < len(code.splitlines()) <= MOST_EXAMPLE_LINES
    seen = run(code + "import sys\nprint(*{'torch', 'transformers'} & set(sys.modules))")
    assert seen == ""


def test_the_examples_of_its_page_run_in_their_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    said = run("\n".join(blocks))
    assert re.fullmatch(r"start with a large page of \d+ bytes \(.* MiB\), which serves both", said)


def test_its_page_knows_every_kind() -> None:
    text = PAGE.read_text()
    assert [kind.name for kind in GroupKind if f"`{kind.name}`" not in text] == []


def test_every_name_it_promises_is_there() -> None:
    assert all(hasattr(kvell.memory, name) for name in kvell.memory.__all__)


def test_it_imports_neither_torch_nor_transformers() -> None:
    assert (
        run("import sys, kvell.memory; print(*{'torch', 'transformers'} & set(sys.modules))") == ""
    )


NO_EXTENSION = "import sys; sys.modules['kvell.prefix._core'] = None; "


def test_without_the_extension_one_line_names_the_remedy() -> None:
    code = "try:\n    import kvell.memory\nexcept Exception as error:\n    print(error)"
    said = run(f"{NO_EXTENSION}\n{code}")
    assert "\n" not in said
    assert said.startswith("kvell.prefix._core=missing: this installation lacks the compiled")
    assert said.endswith("install a wheel of Kvell, or install a C++ compiler and reinstall Kvell")


def test_without_the_extension_the_command_ends_with_that_line() -> None:
    code = f"{NO_EXTENSION}sys.argv = ['kvell', 'plan', 'smollm2']; import kvell.cli.start as start"
    command = [sys.executable, "-c", f"{code}; start.main()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "install a wheel of Kvell" in done.stderr


def test_a_core_knows_its_layout(layout: Layout) -> None:
    assert create_core(layout).layout is layout


def second(**changes: Any) -> list[LayerSpec]:
    """Half the heads' size of the first model: pages of which two go where one went."""
    return [LayerSpec(0, GroupKind.FULL, 1, 32, 2, **changes)]


def serve(core: MemoryCore, handle: int, tokens: int) -> int:
    """Compute a request's tokens; how many pages it took."""
    handles, until = np.asarray([handle], np.int32), np.asarray([tokens], np.int32)
    core.claim(handle, tokens + 1)
    served, rows = core.grow(handles, until)
    assert served == 1
    core.advance(handles, until)
    return len(rows)


def test_a_second_model_joins_a_pool_in_use(core: MemoryCore) -> None:
    prompt = np.arange(40, dtype=np.int32)
    core.begin_step(1)
    first = core.open(prompt, "")
    serve(core, first, 40)
    before = core.held_pages(first).tolist()
    (group,) = register(core, "b", second())
    assert (group.name, group.model) == ("b:full", "b")
    assert group.page_stride_bytes * group.pages_per_large == core.layout.large_page_bytes
    assert core.layout.groups[1:] == (group,)
    assert core.held_pages(first).tolist() == before
    assert core.peek(prompt, "", model="b") == 0, "what one model has cached is not the other's"
    other = core.open(prompt, "", model="b")
    assert serve(core, other, 40) == 3
    assert core.totals().used_pages == (3, 3)
    assert core.peek(prompt, "", model="b") == core.peek(prompt, "") == 32
    audit(core.layout, core.snapshot())


def test_the_name_given_counts_not_the_layers(core: MemoryCore) -> None:
    (group,) = register(core, "b", second(model="c"))
    assert group.model == "b"
    (third,) = register(core, "c", second())
    assert [g.model for g in core.layout.groups] == ["", "b", third.model]


def refusal(core: MemoryCore, model: str, layers: list[LayerSpec]) -> ChangeSomething:
    """Refused, and nothing has changed."""
    layout, before = core.layout, core.snapshot()
    with pytest.raises(ChangeSomething) as told:
        register(core, model, layers)
    assert core.layout == layout
    assert core.snapshot() == before
    return told.value


@pytest.mark.parametrize("taken", ["", "b"])
def test_a_name_that_is_taken_is_refused(core: MemoryCore, taken: str) -> None:
    register(core, "b", second())
    error = refusal(core, taken, second())
    assert (error.field, error.remedy) == ("model", "use another name")


def test_a_model_without_cache_is_refused(core: MemoryCore) -> None:
    assert refusal(core, "b", []).problem == "stores no KV cache"


def test_a_pool_cut_at_start_has_nothing_to_give() -> None:
    layout = plan_layout([LayerSpec(0, GroupKind.FULL, 1, 64, 2)], 1 << 20, manager="static")
    assert refusal(create_core(layout), "b", second()).field == "manager"


def test_a_refusal_names_the_large_page_that_serves_both_next_time(core: MemoryCore) -> None:
    """A state of 10,000 bytes in large pages of 4,096."""
    huge = [LayerSpec(0, GroupKind.STATE, 0, 0, 2, state_bytes=10_000)]
    error = refusal(core, "b", huge)
    assert (error.field, error.value) == ("large_page_bytes", core.layout.large_page_bytes)
    assert "b:state" in error.problem
    named = re.search(r"large page of (\d+) bytes", error.remedy)
    assert named is not None
    ours = [LayerSpec(0, GroupKind.FULL, 1, 64, 2)]
    again = create_core(plan_layout(ours, 1 << 20, large_page_bytes=int(named[1])))
    (group,) = register(again, "b", huge)
    for one in (group, again.layout.groups[0]):
        assert one.padding_bytes <= MAX_REGISTERED_PADDING * one.page_bytes
    again.begin_step(1)
    assert serve(again, again.open(np.arange(9, dtype=np.int32), "", model="b"), 9) == 1


def test_an_unknown_rule_of_eviction_is_refused(layout: Layout) -> None:
    with pytest.raises(ChangeSomething, match="eviction=fifo: is not a rule"):
        create_core(layout, eviction="fifo")  # type: ignore[arg-type]
