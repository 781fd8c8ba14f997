"""A model's seams, recorded in order."""

from dataclasses import replace

import torch

from kvell.models.paged_model import ForwardBatch, PagedModel
from tests.models.harness import (
    PagedRunner,
    prompt_ids,
    runner_over,
)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.shapes: list[torch.Size] = []

    def after_kv_write(self, layer: int) -> None:
        self.calls.append(("written", layer))

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        self.calls.append(("before", layer))
        self.shapes.append(query.shape)

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        self.calls.append(("after", layer))
        self.shapes.append(output.shape)


def batch_of(runner: PagedRunner, ids: list[int]) -> ForwardBatch:
    seen: list[ForwardBatch] = []

    class Spy:
        def forward(self, batch: ForwardBatch, _callbacks: object) -> torch.Tensor:
            seen.append(batch)
            return torch.empty(0)

    replace(runner, model=Spy()).step([("a", ids)])  # type: ignore[arg-type]
    return seen[0]


def assert_every_seam_in_order(model: PagedModel) -> None:
    """Gemma 3, whose callbacks come three times a layer and change no logit."""
    ids, recorder = prompt_ids(9), Recorder()
    runner = runner_over(model)
    runner.callbacks = recorder
    with_callbacks = runner.step([("a", ids)])
    expected = [(seam, layer) for layer in range(6) for seam in ("written", "before", "after")]
    assert recorder.calls == expected
    assert set(recorder.shapes) == {torch.Size((9, 4, 16))}
    assert torch.equal(with_callbacks, runner_over(model).step([("a", ids)]))


def logits_of(model: PagedModel) -> torch.Tensor:
    return runner_over(model).step([("a", prompt_ids(20))]).clone()
