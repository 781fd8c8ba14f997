import pytest

from bench.cost.replay_vs_server import compared


def rounds(*seconds: float) -> list[dict[str, float]]:
    return [{"ttft_seconds_p50": each} for each in seconds]


def test_each_round_is_held_against_itself() -> None:
    # the machine is half as fast in the third round, for both
    found = compared(rounds(1.0, 1.1, 2.2), rounds(1.0, 1.0, 2.0))["ttft_seconds_p50"]
    assert found["miss"] == pytest.approx(0.1)
    assert found["spread"] == pytest.approx(1.0)
    assert found["kept"]


@pytest.mark.parametrize(
    ("replayed", "kept"), [(1.09, True), (0.92, True), (1.11, False), (0.89, False)]
)
def test_a_steady_server_must_be_met_within_a_tenth(replayed: float, kept: bool) -> None:
    found = compared(rounds(replayed, replayed), rounds(1.0, 1.0))["ttft_seconds_p50"]
    assert found["kept"] is kept


def test_twice_the_spread_counts_but_no_more_than_a_fifth() -> None:
    restless = rounds(0.95, 1.0, 1.03)  # a spread of 8 %
    assert compared(rounds(1.1, 1.15, 1.2), restless)["ttft_seconds_p50"]["kept"]
    wild = rounds(0.7, 1.0, 1.3)
    assert not compared(rounds(0.9, 1.25, 1.7), wild)["ttft_seconds_p50"]["kept"]
