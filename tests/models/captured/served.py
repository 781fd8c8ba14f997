"""Engines over tiny models, on a device of the tests or computed step by step."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.core.journal import Journal
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import audit
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.testing.accepting import is_accepted
from tests.engine.seen import use_rule
from tests.engine.swapping import Always
from tests.engine.works import spec_of
from tests.models.captured.fake_graphs import FakeGraphs, Launched
from tests.models.harness import prompt_ids, tiny_module

PREFIX = prompt_ids(24, seed=24)
"""What prompts may begin with."""


@dataclass(frozen=True)
class Coming:
    """A request that comes when an engine has run some steps.

    :param shared: tokens that its prompt has in common with others.
    :param own: further tokens of its prompt.
    """

    step: int
    shared: int
    own: int
    outputs: int
    temperature: float = 0.0


class Served:
    """An engine over a tiny model.

    :param graphs: the device that records its steps; None: each step is computed.
    :param depth: None: as the engine chooses.
    :param kernels: of attention; None: the portable ones.
    :param buffer_bytes: of a CPU buffer, to which it swaps whenever it can; None: there is none.
    """

    def __init__(
        self,
        architecture: str,
        graphs: FakeGraphs | None,
        depth: int | None,
        kv_bytes: int,
        buffer_bytes: int | None = None,
        max_model_len: int = 128,
        kernels: AttentionKernels | None = None,
    ) -> None:
        self.graphs = graphs
        module = copy.deepcopy(tiny_module(architecture))
        description = describe_as(module.config, torch.float32, torch.float32)
        attention = Launched(kernels or PortableKernels())
        self.model = PagedModel(module, description, attention, torch.float32)
        self.journal = Journal()
        options = EngineOptions(
            kv_memory_bytes=kv_bytes, max_model_len=max_model_len,
            max_num_batched_tokens=64, max_num_seqs=4,
            async_scheduling=None if depth is None else depth > 0,
            copies_under_pass=False, cpu_buffer_bytes=buffer_bytes,
        )  # fmt: skip
        self.engine = build_engine(
            self.model, architecture, options, journal=self.journal, graphs=graphs
        )
        swapping = self.engine.core.scheduler.swapping
        if swapping is not None:
            assert swapping.prefixes is not None
            use_rule(swapping, Always())

    def submit(self, name: str, prompt: list[int], outputs: int, temperature: float) -> None:
        sampling = SamplingParams(
            temperature=temperature, max_tokens=outputs, ignore_eos=True, seed=len(name)
        )
        spec = spec_of(np.array(prompt, np.int32), sampling, name)
        assert is_accepted(self.engine.handle(Submit(spec)))

    def serve(self, requests: Sequence[Coming]) -> None:
        coming = dict(enumerate(requests))
        for step in count():
            for number in [number for number, request in coming.items() if request.step <= step]:
                request = coming.pop(number)
                prompt = PREFIX[: request.shared] + prompt_ids(request.own, seed=number)
                self.submit(str(number), prompt, request.outputs, request.temperature)
            if self.engine.has_work():
                self.step()
            elif not coming:
                return

    def step(self) -> None:
        memory = self.engine.core.memory
        events = self.engine.step()
        assert audit(memory.layout, memory.snapshot()) == []
        ends = [event for event in events if isinstance(event, Finished)]
        assert all(end.reason == "length" for end in ends)

    def run(self) -> None:
        while self.engine.has_work():
            self.step()
