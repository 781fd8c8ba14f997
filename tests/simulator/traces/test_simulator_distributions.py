"""Lengths as users write them."""

import numpy as np
import pytest

from kvell.errors import ChangeSomething
from kvell.simulator.traces.distributions import Distribution, independent, parse_distribution


def drawn(text: str, count: int = 40_000) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return parse_distribution(text, "--x").draw(np.random.default_rng(0), count)


@pytest.mark.parametrize(
    ("text", "kind", "numbers"),
    [
        ("512", "fixed", (512.0,)),
        ("128:512", "uniform", (128.0, 512.0)),
        ("uniform:3:3", "uniform", (3.0, 3.0)),
        ("normal:512:0", "normal", (512.0, 0.0)),
        ("exponential:9.5", "exponential", (9.5,)),
    ],
)
def test_what_is_written(text: str, kind: str, numbers: tuple[float, ...]) -> None:
    assert parse_distribution(text, "--x") == Distribution(kind, numbers)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("512", 512, 0),
        ("100:300", 200, 200 / 12**0.5),
        ("normal:500:50", 500, 50),
        ("lognormal:300:200", 300, 200),
        ("exponential:400", 400, 400),
    ],
)
def test_mean_and_deviation(text: str, mean: float, deviation: float) -> None:
    found = drawn(text)
    assert found.mean() == pytest.approx(mean, rel=0.03)
    assert found.std() == pytest.approx(deviation, rel=0.04, abs=0.1)


@pytest.mark.parametrize("text", ["1:3", "normal:2:5", "exponential:1", "lognormal:1:9"])
def test_never_less_than_a_token(text: str) -> None:
    assert drawn(text).min() == 1


def test_both_ends_of_a_range_come() -> None:
    counts = np.bincount(drawn("2:5"))
    assert counts[:2].tolist() == [0, 0]
    assert counts[2:].min() > 0.9 * counts[2:].max()


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", ":", "5:x", "normal:5", "normal:5:5:5", "1:2:3", "gamma:1:2", "0", "-4", "9:3"),
        *("nan", "inf", "1e12", "normal:5:-1", "exponential:0"),
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ChangeSomething, match=r"--x=.*write 512, 128:512"):
        parse_distribution(text, "--x")


def test_requests() -> None:
    prompts, outputs = parse_distribution("9:20", "--p"), parse_distribution("5", "--o")
    rows = independent(prompts, outputs, np.random.default_rng(4), 200)
    assert {row.output_tokens for row in rows} == {5}
    assert {row.prompt_tokens for row in rows} == set(range(9, 21))
    assert all(len(row.block_ids) == 0 and row.session is None for row in rows)
