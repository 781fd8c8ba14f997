"""What a record cannot repeat, planted one by one: each is caught."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np
import pytest
import torch

from kvell.models.captured.passes import SLOTS, SlotStep, StepRecords
from kvell.models.captured.slots import DecodeRows, SlotLimits
from kvell.models.forward.forward_batch import ForwardBatch
from tests.models.captured.fake_graphs import FakeGraphs
from tests.models.captured.tape import NotRepeatableError

VOCABULARY = 64
ROWS = 4


@dataclass
class Table:
    """A model without groups: the next token follows from the token and its position."""

    weights: torch.Tensor = field(
        default_factory=lambda: torch.randn(VOCABULARY, VOCABULARY, generator=torch.manual_seed(1))
    )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = self.weights.index_select(0, batch.token_ids)
        return logits + torch.cos(batch.positions.float())[:, None] * self.weights[0]

    def next_tokens(self, tokens: list[int], positions: list[int]) -> list[int]:
        ids, places = torch.tensor(tokens), torch.tensor(positions)
        batch = ForwardBatch(ids, places, (), ids)
        largest: list[int] = self.forward(batch).argmax(-1).tolist()
        return largest


def captured(forward: Callable[[ForwardBatch], torch.Tensor], graphs: FakeGraphs) -> StepRecords:
    pool = torch.empty(0, dtype=torch.uint8)
    return StepRecords(forward, (), graphs, pool, 0, SlotLimits(ROWS, 0, 0, 0))


def rows(tokens: list[int], positions: list[int]) -> DecodeRows:
    return DecodeRows(np.array(tokens), np.array(positions), ())


def slot_step(one: StepRecords, decode: DecodeRows) -> SlotStep:
    step = one.step(decode)
    assert step is not None
    return step


def drawn(one: StepRecords, chance: Random, steps: int = 12, behind: int = 2) -> list[list[int]]:
    """Launch steps of known tokens, up to ``behind`` before the oldest is waited for."""
    launched: list[SlotStep] = []
    told: list[list[int]] = []
    for number in range(steps):
        tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, ROWS))]
        step = slot_step(one, rows(tokens, [number + at for at in range(len(tokens))]))
        one.launch(step)
        launched.append(step)
        if len(launched) > behind:
            told.append(launched.pop(0).tokens())
    return told + [step.tokens() for step in launched]


def expected(table: Table, chance: Random, steps: int = 12) -> list[list[int]]:
    made = []
    for number in range(steps):
        tokens = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, ROWS))]
        made.append(table.next_tokens(tokens, [number + at for at in range(len(tokens))]))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_right_however_late_the_device_is(seed: int) -> None:
    table, graphs = Table(), FakeGraphs(Random(seed) if seed else None)
    assert drawn(captured(table.forward, graphs), Random(seed)) == expected(table, Random(seed))
    assert graphs.replays == 12


def test_a_slot_that_is_filled_while_the_device_still_reads_it() -> None:
    one = captured(Table().forward, FakeGraphs())
    slot = one.slots[0]
    for at in range(SLOTS):
        one.slots[at] = slot

    class Early:
        def synchronize(self) -> None:
            """Waits for nothing."""

    real = one.step

    def step(decode: DecodeRows) -> SlotStep | None:
        slot.read = Early()
        return real(decode)

    one.step = step  # type: ignore[method-assign]
    with pytest.raises(IndexError):  # it got what stands there once the device has read it
        drawn(one, Random(0))


def test_tokens_that_are_read_before_they_are_there() -> None:
    table, one = Table(), captured(Table().forward, FakeGraphs())
    step = slot_step(one, rows([3], [5]))
    one.launch(step)
    early = step.slot.tokens[:1].tolist()
    assert early != table.next_tokens([3], [5]) == step.tokens()


def twice(forward: Callable[[ForwardBatch], torch.Tensor]) -> None:
    """Record a step and repeat it."""
    one = captured(forward, FakeGraphs())
    for number in range(3):
        step = slot_step(one, rows([number], [number]))
        one.launch(step)
        step.tokens()


def test_a_number_of_python_that_changes() -> None:
    table, steps = Table(), count()
    with pytest.raises(NotRepeatableError, match="operation"):
        twice(lambda batch: table.forward(batch) + next(steps))


def test_a_number_that_the_device_is_asked_for() -> None:
    table = Table()
    with pytest.raises(NotRepeatableError, match="waits for the device"):
        twice(lambda batch: table.forward(batch) * batch.positions[0].item())


def test_numbers_that_are_listed() -> None:
    table = Table()
    with pytest.raises(NotRepeatableError, match="operation"):
        twice(lambda batch: table.forward(batch) + sum(batch.token_ids.tolist()))


def test_a_shape_that_data_decides() -> None:
    table = Table()
    with pytest.raises(NotRepeatableError, match="nonzero"):
        twice(lambda batch: table.forward(batch)[batch.positions.nonzero()[:, 0]])


def test_weights_that_are_allocated_again() -> None:
    tables = [Table() for _ in range(3)]
    with pytest.raises(NotRepeatableError, match="operation"):
        twice(lambda batch: tables.pop().forward(batch))


def test_a_tensor_that_is_kept_for_the_next_run() -> None:
    table, kept = Table(), dict[str, torch.Tensor]()

    def forward(batch: ForwardBatch) -> torch.Tensor:
        kept["logits"] = table.forward(batch)
        return kept["logits"] * 2

    with pytest.raises(NotRepeatableError, match="stays"):
        twice(forward)


def test_a_tensor_of_pythons_numbers() -> None:
    table = Table()
    with pytest.raises(NotRepeatableError, match="Python's numbers"):
        twice(lambda batch: table.forward(batch) + torch.tensor([1.0, 2.0])[0])


def test_a_batch_of_one_step_that_a_record_keeps() -> None:
    """It reads host memory of its own step, which is gone when the next one runs."""
    table, steps = Table(), [torch.tensor([number]) for number in range(9)]

    def forward(batch: ForwardBatch) -> torch.Tensor:
        own = steps.pop()
        return table.forward(batch) + table.weights.index_select(0, own)

    with pytest.raises(NotRepeatableError, match="operation"):
        twice(forward)


def test_an_output_whose_rows_change() -> None:
    table, steps = Table(), count(1)
    with pytest.raises(NotRepeatableError, match="operation"):
        twice(lambda batch: table.forward(batch)[:, : VOCABULARY - next(steps)])
