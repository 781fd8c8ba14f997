"""A tiny model in an engine whose steps take as long as a known machine says."""

import copy
from dataclasses import dataclass

import torch

from kvell.attention.choice import choose_kernels
from kvell.calibration.subject import Subject, subject_of
from kvell.clock import VirtualClock
from kvell.cost.amounts import shape_of
from kvell.cost.model import CostModel
from kvell.cost.operators import Operators
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.engine.setup.options import EngineOptions
from kvell.models.captured.passes import SlotStep
from kvell.models.config.description import describe
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.vocabulary import MIB
from tests.cost.oracles import oracle
from tests.models.harness import tiny_module


@dataclass
class KnownRunner:
    """Runs a plan for nothing, and lets as much time pass as the machine would take."""

    runner: Runner
    clock: VirtualClock
    machine: CostModel

    def run(self, plan: StepPlan) -> StepResult:
        result = self.runner.run(plan)
        self.clock.advance(self.machine.step_seconds(plan.work))
        return result


class IdleModel(PagedModel):
    """Answers with zeros, for those who only ask how long it took."""

    def forward(
        self, batch: ForwardBatch | SlotStep, callbacks: LayerCallbacks | None = None
    ) -> torch.Tensor:
        assert isinstance(batch, ForwardBatch)
        return torch.zeros(1).expand(len(batch.logits_rows), self.description.vocab_size)


@dataclass(frozen=True)
class Known:
    """A subject, its time, and what its steps cost."""

    subject: Subject
    clock: VirtualClock
    machine: Operators


def known(
    architecture: str,
    kv_memory_bytes: int = 64 * MIB,
    model_len: int = 8192,
    *,
    computes: bool = True,
) -> Known:
    """A fresh one.

    :param computes: False leaves forward passes out.
    """
    module = copy.deepcopy(tiny_module(architecture))
    description = describe(module.config, 4)
    make = PagedModel if computes else IdleModel
    model = make(module, description, choose_kernels(torch.device("cpu")))
    object.__setattr__(model.description, "max_model_len", model_len)
    subject = subject_of(
        model,
        architecture,
        EngineOptions(
            kv_memory_bytes=kv_memory_bytes,
            max_model_len=None,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
        ),
    )
    clock, machine = VirtualClock(), oracle(shape_of(description.layers))
    subject.engine.runner = KnownRunner(subject.engine.runner, clock, machine)
    return Known(subject, clock, machine)
