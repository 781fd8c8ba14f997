"""A token that is not a number spoils what follows it in its piece, and nothing before."""

from collections.abc import Callable

import pytest
import torch

from kvell.models.states.delta_scans import ChannelDeltaScan, GatedDeltaScan
from kvell.models.states.scans import ScalarDecayScan, Scan, SelectiveScan

PLACES, HEADS, NUMBERS = 40, 2, 4


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(2, PLACES, *shape)


def decay(*shape: int) -> torch.Tensor:
    return -torch.rand(2, PLACES, *shape)


SCANS: dict[str, tuple[Scan, Callable[[], list[torch.Tensor]], tuple[int, ...]]] = {
    "selective": (
        SelectiveScan(-torch.rand(6, NUMBERS)),
        lambda: [draw(6), torch.rand(2, PLACES, 6), draw(NUMBERS), draw(NUMBERS)],
        (6, NUMBERS),
    ),
    "scalar decay": (
        ScalarDecayScan(-torch.rand(HEADS)),
        lambda: [draw(HEADS, 3), -decay(HEADS), draw(1, NUMBERS), draw(1, NUMBERS)],
        (HEADS, 3, NUMBERS),
    ),
    "gated delta": (
        GatedDeltaScan(),
        lambda: [
            *(draw(HEADS, NUMBERS), draw(HEADS, NUMBERS), draw(HEADS, 3)),
            *(decay(HEADS), torch.rand(2, PLACES, HEADS)),
        ],
        (HEADS, NUMBERS, 3),
    ),
    "delta of channels": (
        ChannelDeltaScan(),
        lambda: [
            *(draw(HEADS, NUMBERS), draw(HEADS, NUMBERS), draw(HEADS, 3)),
            *(decay(HEADS, NUMBERS), torch.rand(2, PLACES, HEADS)),
        ],
        (HEADS, NUMBERS, 3),
    ),
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, 30, PLACES - 1])
def test_no_number_goes_back(name: str, place: int) -> None:
    torch.manual_seed(place)
    scan, make, shape = SCANS[name]
    inputs, state = make(), torch.randn(2, *shape)
    sound, _ = scan.prepare(*inputs)(0, 2, state)
    assert sound.isfinite().all()
    for number in range(len(inputs)):
        broken = [each.clone() for each in inputs]
        broken[number][0, place] = torch.nan
        output, after = scan.prepare(*broken)(0, 2, state)
        assert torch.equal(output[0, :place], sound[0, :place]), f"input {number}"
        assert output[0, place:].isnan().flatten(1).any(1)[0], f"input {number}"
        assert torch.equal(output[1], sound[1]), f"input {number}: another request"
        assert after[1].isfinite().all()
