"""Drawing tokens: distribution, support, and what a draw may depend on."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.sampling.draw import GREEDY, RowSampling, sample, uniform
from kvell.vocabulary import NOT_NUMBERS

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
LOGITS = PROBABILITIES.log()


def draws(logits: torch.Tensor, count: int, **settings: float | int) -> Counter[int]:
    """How often each token was drawn over ``count`` output positions of one seed."""
    rows = [row(position=position, **settings) for position in range(count)]
    return Counter(sample(logits.expand(count, -1), rows))


def row(**settings: float | int) -> RowSampling:
    defaults: dict[str, float | int] = {"temperature": 1.0, "seed": 7}
    return RowSampling(**{**defaults, **settings})  # type: ignore[arg-type]


def chi_square(seen: Counter[int], expected: torch.Tensor) -> float:
    """Pearson's statistic over the tokens of non-zero probability."""
    total = sum(seen.values())
    cells = [(seen[token], float(p) * total) for token, p in enumerate(expected) if p > 0]
    return sum((count - wanted) ** 2 / wanted for count, wanted in cells)


def random_logits(rows: int, vocabulary: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator) * 3


class TestGreedy:
    def test_takes_the_largest_logit(self) -> None:
        logits = random_logits(16, 1000)
        rows = [row(temperature=0.0)] * 16
        assert sample(logits, rows) == [int(line.argmax()) for line in logits]

    def test_first_of_equals_wins(self) -> None:
        logits = torch.zeros(1, 5000)
        logits[0, [1234, 1235, 4999]] = 1.0
        assert sample(logits, [row(temperature=0.0)]) == [1234]

    def test_ignores_seed_position_and_filters(self) -> None:
        rows = [row(temperature=0.0, seed=s, position=s, top_k=3, top_p=0.1) for s in range(20)]
        assert set(sample(LOGITS.expand(20, -1), rows)) == {1}

    def test_empty_batch(self) -> None:
        assert sample(torch.empty(0, 10), []) == []

    def test_row_count_must_match(self) -> None:
        with pytest.raises(ValueError, match="2 rows for logits of 1"):
            sample(LOGITS[None], [row(), row()])


class TestDistribution:
    # 99.9 % points of chi-square with 4, 3 and 2 degrees of freedom.

    @pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
    def test_temperature_one_draws_the_softmax(self, seed: int) -> None:
        assert chi_square(draws(LOGITS, 4000, seed=seed), PROBABILITIES) < 18.5

    def test_one_position_over_many_seeds(self) -> None:
        rows = [row(seed=seed, position=0) for seed in range(4000)]
        seen = Counter(sample(LOGITS.expand(4000, -1), rows))
        assert chi_square(seen, PROBABILITIES) < 18.5

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_temperature_divides_logits(self, temperature: float) -> None:
        expected = torch.softmax(LOGITS / temperature, dim=0)
        assert chi_square(draws(LOGITS, 4000, temperature=temperature), expected) < 18.5

    def test_top_k_renormalises(self) -> None:
        expected = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.15]) / 0.85
        assert chi_square(draws(LOGITS, 4000, top_k=3), expected) < 13.9

    def test_top_p_renormalises(self) -> None:
        expected = torch.tensor([0.0, 0.4, 0.0, 0.3, 0.15]) / 0.85
        assert chi_square(draws(LOGITS, 4000, top_p=0.8), expected) < 13.9

    def test_successive_draws_are_not_correlated(self) -> None:
        """Pairs of neighbouring positions fill a grid of 4 by 4 evenly (15 degrees: 37.7)."""
        values = [uniform(11, position) for position in range(8001)]
        pairs = zip(values[0:-1:2], values[1::2], strict=True)
        seen = Counter(int(a * 4) * 4 + int(b * 4) for a, b in pairs)
        assert chi_square(seen, torch.full((16,), 1 / 16)) < 37.7


class TestSupport:
    @pytest.mark.parametrize(
        ("k", "support"),
        [(1, {1}), (2, {1, 3}), (4, {1, 2, 3, 4}), (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})],
    )
    def test_top_k_keeps_exactly_k(self, k: int, support: set[int]) -> None:
        assert set(draws(LOGITS, 400, top_k=k)) == support

    @pytest.mark.parametrize("k", [0, -1])
    def test_no_top_k_keeps_all(self, k: int) -> None:
        assert set(draws(LOGITS, 400, top_k=k)) == {0, 1, 2, 3, 4}

    def test_top_k_among_equals_keeps_the_lower_ids(self) -> None:
        logits = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0, 1.0])
        assert set(draws(logits, 400, top_k=3)) == {1, 2, 3}

    @pytest.mark.parametrize(
        ("p", "support"),
        [(1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 3, 4})],
    )
    def test_top_p_keeps_the_smallest_set_that_reaches_it(
        self, p: float, support: set[int]
    ) -> None:
        assert set(draws(LOGITS, 400, top_p=p)) == support

    def test_top_p_that_equals_a_sum_needs_no_further_token(self) -> None:
        logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
        assert set(draws(logits, 400, top_p=0.75)) == {0, 1}

    def test_top_p_applies_to_what_top_k_left(self) -> None:
        # Of {0.4, 0.3} the first weighs 0.57, so 0.5 keeps it alone; of all it would not.
        assert set(draws(LOGITS, 400, top_k=2, top_p=0.5)) == {1}
        assert set(draws(LOGITS, 400, top_p=0.5)) == {1, 3}

    def test_excluded_tokens_are_never_drawn(self) -> None:
        logits = LOGITS.clone()
        logits[[0, 1, 4]] = -math.inf
        assert set(draws(logits, 400)) == {2, 3}

    def test_excluded_last_token_is_not_reached_by_rounding(self) -> None:
        logits = torch.tensor([0.0, 0.0, -math.inf, -math.inf])
        assert set(draws(logits, 2000, temperature=100.0)) == {0, 1}

    @given(
        seed=st.integers(0, 2**63 - 1),
        temperature=st.floats(0.01, 100.0),
        top_k=st.integers(-1, 60),
        top_p=st.floats(0.001, 1.0),
    )
    def test_matches_a_plain_reading_of_the_rules(
        self, seed: int, temperature: float, top_k: int, top_p: float
    ) -> None:
        logits = random_logits(1, 50, seed % 1000)
        settings = row(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        assert sample(logits, [settings])[0] in allowed(logits[0], settings)

    def test_smallest_temperature_is_greedy_in_effect(self) -> None:
        assert set(draws(LOGITS, 200, temperature=1e-300)) == {1}


def allowed(logits: torch.Tensor, settings: RowSampling) -> set[int]:
    """The support, computed token by token as the documentation words it."""
    count = settings.top_k if settings.top_k > 0 else len(logits)
    best = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[:count]
    top = float(logits[best[0]])
    weights = [math.exp((float(logits[token]) - top) / settings.temperature) for token in best]
    kept, mass = set[int](), 0.0
    for token, weight in zip(best, weights, strict=True):
        if mass > settings.top_p + 1e-9 and settings.top_p < 1.0:
            break
        kept.add(token)
        mass += weight / sum(weights)
    return kept


class TestIndependence:
    def test_same_seed_and_position_draw_the_same(self) -> None:
        logits = random_logits(1, 2000)
        settings = row(temperature=3.0, seed=5, position=17)
        assert len({sample(logits, [settings])[0] for _ in range(5)}) == 1

    def test_positions_and_seeds_differ(self) -> None:
        logits = torch.zeros(64, 2000)
        by_position = sample(logits, [row(position=position) for position in range(64)])
        by_seed = sample(logits, [row(seed=seed) for seed in range(64)])
        assert len(set(by_position)) > 55
        assert len(set(by_seed)) > 55
        assert by_position != by_seed

    def test_rows_do_not_depend_on_their_neighbours(self) -> None:
        logits = random_logits(33, 3000)
        rows = [
            row(temperature=index % 4, top_k=(index % 3) * 20, top_p=1 - index / 99, seed=index)
            for index in range(33)
        ]
        alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(33)]
        assert sample(logits, rows) == alone
        assert sample(logits.flip(0), rows[::-1]) == alone[::-1]

    def test_strided_logits_draw_the_same(self) -> None:
        wide = random_logits(4, 4096)
        rows = [row(seed=seed, top_k=50, top_p=0.9) for seed in range(4)]
        assert sample(wide[:, ::2], rows) == sample(wide[:, ::2].contiguous(), rows)

    def test_logits_are_left_alone(self) -> None:
        logits = random_logits(2, 100)
        before = logits.clone()
        sample(logits, [row(top_k=5, top_p=0.5), row(temperature=0.0)])
        assert torch.equal(logits, before)


class TestUniform:
    def test_values_are_pinned(self) -> None:
        """A change of these numbers changes what every seeded request draws."""
        assert [uniform(0, 0), uniform(0, 1), uniform(42, 0)] == PINNED

    @given(st.integers(0, 2**63 - 1), st.integers(0, 2**31))
    def test_range(self, seed: int, position: int) -> None:
        assert 0.0 <= uniform(seed, position) < 1.0

    def test_neighbouring_seeds_share_no_stream(self) -> None:
        streams = [{uniform(seed, position) for position in range(200)} for seed in range(20)]
        assert len(set().union(*streams)) == 4000


PINNED = [0.7012121095215252, 0.3871241409757855, 0.9557467261317436]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "row",
    [
        GREEDY,
        RowSampling(1.0, seed=3),
        RowSampling(0.7, top_k=5, seed=3),
        RowSampling(0.7, top_k=1, top_p=0.5, min_p=0.1, seed=3),
        RowSampling(1.3, top_p=0.9, seed=3),
        RowSampling(1.0, min_p=0.2, seed=3),
    ],
)
def test_a_row_that_is_no_numbers_yields_no_token(number: float, row: RowSampling) -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    expected = sample(logits.clone(), [row] * 4)
    logits[1, 7] = number
    logits[3] = -torch.inf if number > 0 else number
    tokens = sample(logits, [row] * 4)
    assert tokens == [expected[0], NOT_NUMBERS, expected[2], NOT_NUMBERS]
