"""Several tiny models in one engine, each request's answer held against its own model."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.engine.setup.several_models import ServedModel
from kvell.memory import Manager
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.models.harness import tiny_module
from tests.models.served import MAX_MODEL_LEN, Answer, Audited, Recorder, assert_answer


def recorder(architecture: str) -> Recorder:
    module = copy.deepcopy(tiny_module(architecture))
    description = describe_as(module.config, torch.float32, torch.float32)
    return Recorder(PagedModel(module, description, choose_kernels(torch.device("cpu"))))


@dataclass
class Watched:
    """A runner that keeps the plans it was given."""

    runner: Runner
    plans: list[StepPlan] = field(default_factory=list)

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return self.runner.run(plan)


class Together(Audited):
    """Requests of several models, the first of which is what requests without a name get."""

    def __init__(
        self,
        *architectures: str,
        kv_bytes: int = 8 * MIB,
        batched: int = 256,
        max_model_len: int = MAX_MODEL_LEN,
        manager: Manager = "kvell",
        draft_tokens: int = 0,
        cpu_buffer_bytes: int | None = None,
    ) -> None:
        self.architectures = {f"m{i}": name for i, name in enumerate(architectures)}
        self.recorders = {name: recorder(each) for name, each in self.architectures.items()}
        options = EngineOptions(
            kv_memory_bytes=kv_bytes,
            max_model_len=max_model_len,
            max_num_batched_tokens=batched,
            manager=manager,
            num_speculative_tokens=draft_tokens,
            prompt_lookup_min=1,
            cpu_buffer_bytes=cpu_buffer_bytes,
            copies_under_pass=True,
        )
        beside = [ServedModel(name, one) for name, one in self.recorders.items() if name != "m0"]  # type: ignore[arg-type]
        self.engine = build_engine(self.recorders["m0"], "m0", options, beside=beside)  # type: ignore[arg-type]
        self.engine.runner = self.watched = Watched(self.engine.runner)
        self.answers = {}
        self.models: dict[str, str] = {}

    def submit(self, name: str, model: str, prompt: Sequence[int], outputs: int = 8) -> None:
        self.answers[name], self.models[name] = Answer(list(prompt)), model or "m0"
        params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        ids = np.asarray(prompt, "<i4").tobytes()
        command = Submit(RequestSpec(RequestId(name), ids, params, model=model))
        assert is_accepted(self.engine.handle(command))

    def ask(self, name: str, model: str, prompt: Sequence[int], outputs: int = 8) -> Answer:
        self.submit(name, model, prompt, outputs)
        self.run()
        return self.answers[name]

    def outputs(self, model: str) -> dict[str, list[int]]:
        return {n: a.output for n, a in self.answers.items() if self.models[n] == model}

    def preemptions(self, model: str) -> int:
        ends = [a.finished for n, a in self.answers.items() if self.models[n] == model]
        return sum(end.preemptions for end in ends if end is not None)

    def used_bytes(self) -> dict[str, int]:
        used = dict.fromkeys(self.architectures, 0)
        totals = self.engine.core.memory.totals()
        for group, pages in zip(self.layout.groups, totals.used_pages, strict=True):
            used[group.model] += pages * group.page_stride_bytes
        return used

    def mixed_steps(self) -> int:
        """Steps that computed tokens of more than one model."""
        return sum(len({work.spec.model for work in p.work}) > 1 for p in self.watched.plans)

    def _note(self, events: Sequence[object]) -> None:
        rows = {name: iter(one.logits) for name, one in self.recorders.items()}
        for event in events:
            if isinstance(event, Tokens):
                answer = self.answers[event.request_id]
                answer.output += event.token_ids
                answer.logits.append(next(rows[self.models[event.request_id]]))
            elif isinstance(event, Finished):
                self.answers[event.request_id].finished = event


def assert_all(together: Together) -> None:
    """Every answer is what its own model says, and the answers of each vary."""
    for name, answer in together.answers.items():
        assert_answer(together.architectures[together.models[name]], answer)
    for model in together.architectures:
        outputs = [token for output in together.outputs(model).values() for token in output]
        assert len(set(outputs)) > len(outputs) // 4, "answers that repeat themselves prove nothing"
