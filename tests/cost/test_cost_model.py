"""What schedulers ask: exec(x, y), equation 2, f(β) and g(S)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvell.cost.model import (
    Fetch,
    attended_tokens_per_second,
    batch_seconds,
    decode_seconds,
    prefill_seconds,
)
from kvell.cost.work import Work
from tests.cost.oracles import SHAPE, oracle


@dataclass
class Watched:
    """A second a step; remembers them."""

    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)

    def step_seconds(self, work: Sequence[Work]) -> float:
        self.steps.append([(w.start, w.count, w.num_logits) for w in work])
        return 1.0


class TestPrefill:
    def test_chunks_beside_the_running_batch(self) -> None:
        watched = Watched()
        seconds = prefill_seconds(watched, 300, 0.5, running_tokens=(40, 50), chunk_tokens=102)
        assert seconds == 2.0
        assert watched.steps == [
            [(40, 1, 1), (50, 1, 1), (150, 100, 0)],
            [(41, 1, 1), (51, 1, 1), (250, 50, 1)],
        ]

    def test_the_last_token_is_computed_in_any_case(self) -> None:
        watched = Watched()
        prefill_seconds(watched, 300, 1.0)
        assert watched.steps == [[(299, 1, 1)]]

    def test_more_cached_is_never_slower(self) -> None:
        times = [prefill_seconds(oracle(), 2000, y / 10) for y in range(10)]
        assert times == sorted(times, reverse=True)

    def test_a_hit_on_the_host_is_fetched(self) -> None:
        fetch = Fetch(SHAPE, bytes_per_second=1e6)
        here = prefill_seconds(oracle(), 1000, 0.6)
        there = prefill_seconds(oracle(), 1000, 0.6, medium="host", fetch=fetch)
        assert there - here == pytest.approx((600 * 256 + 128 * 384) / 1e6)
        nothing = prefill_seconds(oracle(), 1000, 0.0, medium="host", fetch=fetch)
        assert nothing == prefill_seconds(oracle(), 1000, 0.0)

    @pytest.mark.parametrize(("tokens", "ratio"), [(0, 0.0), (10, 1.1), (10, -0.1)])
    def test_what_no_prompt_is(self, tokens: int, ratio: float) -> None:
        with pytest.raises(ValueError, match="no prompt"):
            prefill_seconds(oracle(), tokens, ratio)

    def test_a_hit_on_the_host_needs_a_price(self) -> None:
        with pytest.raises(ValueError, match="fetch"):
            prefill_seconds(oracle(), 10, 0.5, medium="host")


class TestEquation5:
    def test_a_step_is_batch_and_attention(self) -> None:
        """T(β, S) = T(β) + Σ S/g(S), where windows are full."""
        machine = oracle()
        batch = batch_seconds(machine, 8)
        assert decode_seconds(machine, [0] * 8) == batch
        whole = decode_seconds(machine, [3000] * 8) - decode_seconds(machine, [1000] * 8)
        assert whole == pytest.approx(8 * 2000 / attended_tokens_per_second(machine))

    def test_batching_pays(self) -> None:
        rates = [batch / batch_seconds(oracle(), batch) for batch in (1, 4, 16, 64)]
        assert rates == sorted(rates)
