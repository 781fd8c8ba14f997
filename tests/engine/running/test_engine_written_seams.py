"""What a pass tells at its seams of what it has written, and whom it calls there beside."""

from dataclasses import dataclass, field

import pytest
import torch

from kvell.engine.running.runner import WrittenSeams
from kvell.pages.layout import GroupKind, GroupSpec
from kvell.pages.stages import stages_of

GROUP = GroupSpec("full", GroupKind.FULL, (1, 2, 5, 6), 8, 4, 128, 2)
HEADS = torch.zeros(1, 1, 1)


@dataclass
class Beside:
    """Other callbacks of the same pass."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    def after_kv_write(self, layer: int) -> None:
        self.calls.append(("written", layer))

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        assert query is HEADS
        self.calls.append(("before", layer))

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        assert output is HEADS
        self.calls.append(("after", layer))


def run(seams: WrittenSeams, layers: list[int], told: list[int]) -> list[list[int]]:
    found = []
    for layer in layers:
        seams.after_kv_write(layer)
        found.append(list(told))
        seams.before_attend(layer, HEADS)
        seams.after_attend(layer, HEADS)
        assert told == found[-1], "only what is written is told"
    return found


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (4, [[], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        (2, [[], [], [0], [0], [0], [0, 1]]),
        (1, [[], [], [], [], [], [0]]),
    ],
)
def test_a_stage_is_told_once_behind_its_last_layer(most: int, expected: list[list[int]]) -> None:
    told: list[int] = []
    seams = WrittenSeams(stages_of((GROUP,), most=most), told.append)
    assert run(seams, [0, 1, 2, 3, 5, 6], told) == expected


def test_a_pass_that_leaves_layers_out_tells_of_the_last_stage_it_has_passed() -> None:
    told: list[int] = []
    run(WrittenSeams(stages_of((GROUP,)), told.append), [5, 6], told)
    assert told == [2, 3]


def test_others_are_called_as_without_it_and_before_anything_is_told() -> None:
    told, beside = list[int](), Beside()

    def tell(stage: int) -> None:
        assert beside.calls[-1][0] == "written"
        told.append(stage)

    run(WrittenSeams(stages_of((GROUP,)), tell, beside), [1, 2], told)
    assert beside.calls == [(name, n) for n in (1, 2) for name in ("written", "before", "after")]
    assert told == [0, 1]
