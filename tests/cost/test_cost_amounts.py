"""What a step holds, counted by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cost.amounts import Amounts, AttentionSpan, ModelShape, shape_of
from kvell.cost.work import Chunk
from kvell.engine.requests.plan import TokenWork
from kvell.memory import GroupKind, LayerSpec, policy_of
from kvell.pages.grouping import group_of

REACHES = (AttentionSpan(1), AttentionSpan(1, 5), AttentionSpan(1, 4, is_chunked=True))


def read_by(reach: AttentionSpan, position: int) -> int:
    """Tokens that the token at a position reads, itself included: by definition."""
    if not reach.window_tokens:
        return position + 1
    if reach.is_chunked:
        return position % reach.window_tokens + 1
    return min(position + 1, reach.window_tokens)


@given(st.sampled_from(REACHES), st.integers(0, 40))
def test_pairs_are_counted_without_going_through_them(reach: AttentionSpan, tokens: int) -> None:
    assert reach.pairs_before(tokens) == sum(read_by(reach, p) for p in range(tokens))


@given(st.sampled_from(REACHES), st.integers(0, 40))
def test_live_tokens_are_what_the_next_one_reads(reach: AttentionSpan, tokens: int) -> None:
    assert reach.live_tokens(tokens) == read_by(reach, tokens) - 1


@pytest.mark.parametrize(
    ("kind", "window"), [(GroupKind.FULL, 0), (GroupKind.SLIDING, 6), (GroupKind.CHUNKED, 4)]
)
def test_live_tokens_are_those_of_the_memory_core(kind: GroupKind, window: int) -> None:
    layer = LayerSpec(0, kind, 1, 8, 2, window)
    [reach] = shape_of([layer]).reaches
    policy = policy_of(group_of([layer], 1))
    assert [reach.live_tokens(n) for n in range(20)] == [policy.live_tokens(n) for n in range(20)]


def test_a_step() -> None:
    shape = ModelShape((AttentionSpan(2), AttentionSpan(3, 4)), state_layers=1)
    found = shape.amounts([Chunk(9, 1), Chunk(60, 70, num_logits=0)])
    full = 10 + sum(range(61, 131))
    window = 4 + 4 * 70
    assert found == Amounts(
        tokens=71,
        rows=1,
        sequences=2,
        prompts=1,
        pairs=2 * full + 3 * window,
        read_tokens=2 * (10 + 130) + 3 * ((3 + 1) + (3 + 70)),
        scan_rounds=1 + 3,
    )


def test_scans_are_of_models_with_states_only() -> None:
    assert ModelShape((AttentionSpan(1),)).amounts([Chunk(0, 500)]).scan_rounds == 0


def test_an_engines_work_is_work() -> None:
    """Cost models take plans as they are."""
    names = {"start", "count", "num_logits"}
    assert names <= set(dir(TokenWork)) | set(TokenWork.__struct_fields__)


class TestShape:
    LAYERS = (
        LayerSpec(0, GroupKind.FULL, 2, 8, 2),
        LayerSpec(1, GroupKind.SLIDING, 2, 8, 2, 16),
        LayerSpec(2, GroupKind.SLIDING, 2, 8, 2, 16),
        LayerSpec(3, GroupKind.SLIDING, 2, 8, 2, 16, kv_of=2),
        LayerSpec(4, GroupKind.STATE, 0, 0, 2, state_bytes=1000),
        LayerSpec(5, GroupKind.CROSS, 2, 8, 2),
    )

    def test_layers_that_share_keys_attend_all_the_same(self) -> None:
        shape = shape_of(self.LAYERS)
        assert set(shape.reaches) == {AttentionSpan(1), AttentionSpan(3, 16)}
        assert (shape.state_layers, shape.state_bytes) == (1, 1000)

    def test_what_a_hit_must_bring(self) -> None:
        shape = shape_of(self.LAYERS)
        assert shape.token_bytes == 64
        assert shape.stored_bytes(10) == 10 * 64 + 10 * 128 + 1000
        assert shape.stored_bytes(1000) == 1000 * 64 + 16 * 128 + 1000
        assert shape.stored_bytes(0) == 0
