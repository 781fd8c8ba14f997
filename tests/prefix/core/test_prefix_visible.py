"""What a core shows of its pages without a snapshot is what a snapshot says."""

import numpy as np
import numpy.typing as npt
import pytest

from kvell.memory import GroupKind, LayerSpec, PoolSnapshot, VisibleCore, create_core, plan_layout
from kvell.prefix.interface import NO_END, NO_REACH, NO_STEP, WITHHELD_GROUP

FULL = LayerSpec(0, GroupKind.FULL, kv_heads=1, head_size=64, element_bytes=2)
SLIDING = LayerSpec(1, GroupKind.SLIDING, 1, 64, 2, window_tokens=32)
STATE = LayerSpec(2, GroupKind.STATE, 0, 0, 2, state_bytes=4096)
LARGE_PAGES = 64


@pytest.fixture
def core() -> VisibleCore:
    return make_core([FULL, SLIDING])


def make_core(layers: list[LayerSpec]) -> VisibleCore:
    large_bytes = plan_layout(layers, 1 << 20).large_page_bytes
    return create_core(plan_layout(layers, large_bytes * LARGE_PAGES))


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def prompt(length: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.arange(length, dtype=np.int32) + 1000 * seed


def compute(core: VisibleCore, tokens: npt.NDArray[np.int32], step: int) -> int:
    core.begin_step(step)
    handle = core.open(tokens, "")
    core.claim(handle, len(tokens) + 8)
    served, _ = core.grow(ints(handle), ints(len(tokens)))
    assert served == 1
    core.checkpoint(ints(handle), ints(len(tokens)))
    core.advance(ints(handle), ints(len(tokens)))
    return handle


def check(core: VisibleCore) -> PoolSnapshot:
    """Everything shown is in the snapshot too, and the other way round."""
    snapshot = core.snapshot()
    rows = core.large_pages()
    assert rows.dtype == np.int64 and rows.shape == (core.layout.num_large_pages, 4)
    lent = set(snapshot.withheld)
    groups = [WITHHELD_GROUP if i in lent else group for i, group in enumerate(snapshot.group)]
    assert rows[:, 0].tolist() == groups
    assert rows[:, 1].tolist() == list(snapshot.used)
    assert rows[:, 2].tolist() == list(snapshot.cached)
    named = {(entry.group, entry.page): entry.end for entry in snapshot.index}
    for large, group in enumerate(snapshot.group):
        small = core.small_pages(large)
        if group < 0:
            assert small.shape == (0, 4)
            continue
        count = core.layout.groups[group].pages_per_large
        assert small[:, 0].tolist() == list(range(large * count, (large + 1) * count))
        steps = []
        for page, users, end, step in small.tolist():
            assert users == snapshot.refs[group].get(page, 0)
            assert end == named.get((group, page), NO_END)
            key = snapshot.keys[group].get(page)
            assert step == (NO_STEP if key is None else key[1])
            if key is not None and not users:
                steps.append(step)
        shown = int(rows[large, 3])
        assert shown in steps if steps and not snapshot.used[large] else shown == NO_STEP
    return snapshot


def test_an_empty_pool_shows_empty_pages(core: VisibleCore) -> None:
    check(core)
    assert set(core.large_pages()[:, 0].tolist()) == {-1}
    assert set(core.large_pages()[:, 3].tolist()) == {NO_STEP}


def test_used_pages_have_a_user_and_cached_ones_a_step(core: VisibleCore) -> None:
    handle = compute(core, prompt(100), 1)
    used = check(core)
    assert sum(used.used) > 0 and sum(core.large_pages()[:, 1]) == sum(used.used)
    core.begin_step(9)
    core.close(handle)
    check(core)
    rows = core.large_pages()
    assert rows[:, 1].sum() == 0 and rows[:, 2].sum() > 0
    kept = rows[rows[:, 2] > 0]
    assert (kept[:, 3] >= 1).all()


def test_lent_pages_are_told_from_empty_ones(core: VisibleCore) -> None:
    compute(core, prompt(60), 1)
    empty = np.flatnonzero(core.large_pages()[:, 0] == -1).astype(np.int32)
    core.withhold(empty[:3])
    check(core)
    assert (core.large_pages()[empty[:3], 0] == WITHHELD_GROUP).all()
    core.restore(empty[:3])
    check(core)


def test_pages_of_many_requests_are_shown_right(core: VisibleCore) -> None:
    handles = [compute(core, prompt(40 + 9 * seed, seed % 4), seed + 1) for seed in range(8)]
    check(core)
    for handle in handles[::2]:
        core.close(handle)
    check(core)


@pytest.mark.parametrize("large", [-1, LARGE_PAGES])
def test_there_is_no_such_large_page(core: VisibleCore, large: int) -> None:
    with pytest.raises(ValueError, match="no such large page"):
        core.small_pages(large)


def test_every_group_reaches_what_was_computed(core: VisibleCore) -> None:
    compute(core, prompt(100), 1)
    assert core.peek(prompt(200), "") == 96
    assert core.reach(prompt(200), "").tolist() == [96, 96]
    assert core.reach(prompt(200, 1), "").tolist() == [0, 0]
    assert core.reach(prompt(200), "salt").tolist() == [0, 0]


def test_reaching_changes_nothing(core: VisibleCore) -> None:
    core.close(compute(core, prompt(100), 1))
    before = core.snapshot()
    core.reach(prompt(200), "")
    core.large_pages()
    core.small_pages(0)
    assert core.snapshot() == before


def test_a_state_is_what_keeps_a_request_from_going_on() -> None:
    core = make_core([FULL, STATE])
    names = [group.name for group in core.layout.groups]
    handle = compute(core, prompt(100), 1)
    reach = dict(zip(names, core.reach(prompt(90), "").tolist(), strict=True))
    assert reach["full"] == 89, "the pages are there"
    assert reach["state"] == core.peek(prompt(90), "") < 89, "but no state for that length"
    core.close(handle)


def test_groups_of_another_model_reach_nowhere() -> None:
    other = LayerSpec(0, GroupKind.FULL, 1, 64, 2, model="other")
    core = make_core([FULL, other])
    lengths = core.reach(prompt(50), "", model="other").tolist()
    models = [group.model for group in core.layout.groups]
    assert lengths[models.index("other")] == 0 and lengths[models.index("")] == NO_REACH
    with pytest.raises(ValueError, match="model"):
        core.reach(prompt(50), "", model="nobody")
