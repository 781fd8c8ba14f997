"""Errors of the memory core: both implementations raise the same ones, with the same texts."""

import ast
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvell.memory import Layout, VisibleCore
from kvell.prefix.core.compiled import CompiledCore
from kvell.prefix.groups import facts
from tests.oracle.core import lending
from tests.oracle.core.reference import ReferenceCore
from tests.pages.pools import confined, dropping, group, pool_of
from tests.prefix.core.lockstep import ints

Case = Callable[[VisibleCore], object]
Site = tuple[str, int]
PLAIN = pool_of(4, group(4, 2))
TWO_MODELS = pool_of(4, group(4, 2), replace(group(4, 2), model="b"))
ORACLE = Path(lending.__file__).parents[1]


def span(*numbers: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    return np.asarray([numbers], np.int32)


def computed(core: VisibleCore, until: int = 9, count: int = 12) -> int:
    """The handle of a request with so many tokens, some of them computed."""
    handle = core.open(ints(*range(count)), "")
    core.claim(handle, count)
    core.grow(ints(handle), ints(until))
    core.advance(ints(handle), ints(until))
    return handle


def leased(core: VisibleCore) -> int:
    return core.open(ints(1, 2, 3), "", 5)


def step_back(core: VisibleCore) -> None:
    core.begin_step(3)
    core.begin_step(2)


def receive_after_growth(core: VisibleCore) -> None:
    handle = core.open(ints(*range(12)), "")
    core.grow(ints(handle), ints(4))
    core.receive(handle, 4)


def send_away_before_a_copy(core: VisibleCore) -> None:
    core.close(computed(core, until=9, count=9))
    core.send_away(core.open(ints(*range(12)), ""), 0)


def withhold_used(core: VisibleCore) -> None:
    computed(core)
    core.withhold(ints(0))


def withhold_twice(core: VisibleCore) -> None:
    core.withhold(ints(1))
    core.withhold(ints(1))


CASES: list[tuple[Layout, Case]] = [
    (PLAIN, lambda core: core.open(ints(1), "", model="nobody's")),
    (PLAIN, step_back),
    (PLAIN, lambda core: core.claim(core.reserve(ints(1), 5), 3)),
    (PLAIN, lambda core: core.claim(7, 3)),
    (PLAIN, lambda core: core.close(7)),
    (PLAIN, lambda core: core.receive(core.open(ints(*range(9)), ""), 9)),
    (PLAIN, receive_after_growth),
    (PLAIN, lambda core: core.small_pages(4)),
    (PLAIN, lambda core: core.small_pages(-1)),
    (PLAIN, lambda core: core.reserve(ints(1, 1), 5)),
    (PLAIN, lambda core: core.reserve(ints(-1), 5)),
    (TWO_MODELS, lambda core: core.reserve(ints(1, 1), 5, model="b")),
    (PLAIN, lambda core: core.adopt(core.reserve(ints(1), 5), ints(*range(9)), "")),
    (PLAIN, lambda core: core.adopt(leased(core), ints(*range(9)), "")),
    (PLAIN, lambda core: core.adopt(core.reserve(ints(0), 5), ints(), "")),
    (confined(PLAIN), lambda core: core.withhold(ints(1))),
    (PLAIN, withhold_twice),
    (PLAIN, withhold_used),
    (PLAIN, lambda core: core.restore(ints(1))),
    (PLAIN, lambda core: core.restore(ints(1, 9))),
    (PLAIN, lambda core: core.withhold(ints(2, 2))),
    (PLAIN, lambda core: core.open(ints(1, 2, 3), "", images=span(2, 4, 4))),
    (pool_of(4, dropping(4, 2, 12)), lambda core: core.send_away(computed(core), 4)),
    (
        pool_of(4, replace(group(4, 2), counts_images=True)),
        lambda core: core.send_away(computed(core), 4),
    ),
    (pool_of(4, group(4, 2, 8)), lambda core: core.send_away(computed(core), 4)),
    (PLAIN, lambda core: core.send_away(leased(core), 0)),
    (PLAIN, lambda core: core.send_away(core.reserve(ints(1), 5), 0)),
    (PLAIN, send_away_before_a_copy),
    (PLAIN, lambda core: core.send_away(computed(core), 12)),
    (PLAIN, lambda core: core.send_away(computed(core), -4)),
    (PLAIN, lambda core: core.send_away(computed(core), 6)),
    (PLAIN, lambda core: core.register((group(4, 2),))),
    (PLAIN, lambda core: core.register((replace(group(3, 2), model="b"),))),
    (confined(PLAIN), lambda core: core.register((replace(group(4, 2), model="b"),))),
]
MAKERS: list[Layout] = [replace(PLAIN, quota_large_pages=(5,))]


def error_of(layout: Layout, call: Case, kind: type[CompiledCore | ReferenceCore]) -> Exception:
    with pytest.raises((KeyError, ValueError)) as raised:
        call(kind(layout))
    return raised.value


def nothing(core: VisibleCore) -> None:
    """The core is refused when it is made."""


def all_errors(kind: type[CompiledCore | ReferenceCore]) -> list[Exception]:
    cases = [*CASES, *((layout, nothing) for layout in MAKERS)]
    return [error_of(layout, call, kind) for layout, call in cases]


def texts(errors: list[Exception]) -> list[tuple[type[Exception], str]]:
    return [(type(error), str(error)) for error in errors]


def site_of(error: Exception) -> Site:
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert last.lineno is not None
    return last.filename, last.lineno


def sites() -> set[Site]:
    """Every place at which the oracle, or what it shares with the product, refuses a call."""
    places = set()
    for path in [*ORACLE.rglob("*.py"), Path(facts.__file__)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and "ValueError" in ast.unparse(node):
                places.add((str(path), node.lineno))
    return places


def test_both_say_the_same() -> None:
    assert texts(all_errors(CompiledCore)) == texts(all_errors(ReferenceCore))


def test_every_error_of_the_oracle_is_among_them() -> None:
    """An error that nobody provokes here could have two texts."""
    missing = sites() - {site_of(error) for error in all_errors(ReferenceCore)}
    assert missing == set()


def test_every_reason_why_tokens_cannot_be_remote_is_among_them() -> None:
    tree = ast.parse(Path(lending.__file__).read_text())
    [function] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_why_not"]
    returned = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
    said = " | ".join(str(error) for error in all_errors(ReferenceCore))
    parts = [ast.literal_eval(part) for value in returned if value for part in words_of(value)]
    assert [part for part in parts if part not in said] == []


def words_of(value: ast.expr) -> list[ast.Constant]:
    return [node for node in ast.walk(value) if isinstance(node, ast.Constant)]
