"""Engines whose decode steps are recorded: answers and plans of engines that compute them."""

import copy
from random import Random
from typing import Any

import pytest
import torch

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.models.captured.fake_graphs import FakeGraphs, LaunchedKernels
from tests.models.harness import prompt_ids, tiny_module
from tests.models.served import Recorder, Served, assert_all

FAMILIES = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "FalconH1ForCausalLM",
    "Qwen3NextForCausalLM",
)


class Recorded(Served):
    """A served model on a device of the tests."""

    def __init__(self, architecture: str, graphs: FakeGraphs | None, **more: Any) -> None:
        self.architecture = architecture
        module = copy.deepcopy(tiny_module(architecture))
        description = describe_as(module.config, torch.float32, torch.float32)
        self.model = PagedModel(module, description, LaunchedKernels(), torch.float32)
        self.recorder = Recorder(self.model)
        options = EngineOptions(
            kv_memory_bytes=8 * MIB, max_model_len=256, max_num_batched_tokens=64,
            max_num_seqs=6, **more,
        )  # fmt: skip
        self.engine = build_engine(self.recorder, architecture, options, graphs=graphs)  # type: ignore[arg-type]
        self.answers = {}


def traffic(served: Served) -> None:
    """A batch, a prefix that hits, and a longer prompt."""
    for name, length in (("a", 70), ("b", 9), ("c", 130)):
        served.submit(name, prompt_ids(length, seed=length), outputs=9)
    served.run()
    served.submit("again", prompt_ids(130, seed=130), outputs=8)
    served.submit("longer", prompt_ids(130, seed=130) + prompt_ids(20, seed=5), outputs=6)
    served.run()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_answers_are_those_of_computed_steps(architecture: str) -> None:
    graphs = FakeGraphs(Random(architecture))
    served = Recorded(architecture, graphs)
    traffic(served)
    assert_all(served)
    computed = Recorded(architecture, None)
    traffic(computed)
    for name, answer in served.answers.items():
        assert answer.output == computed.answers[name].output
    assert served.model.captured is not None
    counts = served.model.captured.counts
    assert counts[""] == graphs.replays > 10
