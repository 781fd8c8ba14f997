"""The baseline of MemServe: one polynomial for the time of a prompt."""

import pytest

from bench.cost.arch_level import PrefillPoint, fit_arch_level


def test_a_polynomial_is_found() -> None:
    points = [
        PrefillPoint(x, y, 0.01 + 1e-4 * x - 5e-5 * x * y + 1e-7 * x * x)
        for x in (100, 500, 1000, 2000)
        for y in (0.0, 0.3, 0.6, 0.9)
    ]
    found = fit_arch_level(points)
    for point in points:
        predicted = found.prefill_seconds(point.prompt_tokens, point.cached_ratio)
        assert predicted == pytest.approx(point.seconds, rel=1e-6)


def test_too_few_points() -> None:
    with pytest.raises(ValueError, match="6 coefficients"):
        fit_arch_level([PrefillPoint(1, 0.0, 1.0)])
