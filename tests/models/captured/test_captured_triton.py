"""Records with Triton's kernels, which read from memory how much work there is."""

import copy

import numpy as np
import pytest
import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.core.journal import Journal
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepResult
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.engine.works import spec_of
from tests.models.captured.fake_graphs import FakeGraphs, Launched
from tests.models.cases import long_unless
from tests.models.harness import prompt_ids, tiny_module

pytest.importorskip("triton", reason="Triton is not made for this system")

from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.sizes import Blocks

BLOCKS = (Blocks(16, 16, 4, 1, section_tokens=32), Blocks(32, 16, 4, 1))


def answers(
    architecture: str, kernels: AttentionKernels, graphs: FakeGraphs | None
) -> list[StepResult]:
    """Results of the steps of two requests, which end one after the other."""
    module = copy.deepcopy(tiny_module(architecture))
    description = describe_as(module.config, torch.float32, torch.float32)
    model = PagedModel(module, description, kernels, torch.float32)
    journal = Journal()
    options = EngineOptions(
        kv_memory_bytes=8 * MIB, max_model_len=64, max_num_seqs=2, async_scheduling=False
    )
    engine = build_engine(model, architecture, options, journal=journal, graphs=graphs)
    for number, length in enumerate((18, 6)):
        sampling = SamplingParams(temperature=0, max_tokens=2 + number, ignore_eos=True)
        prompt = np.array(prompt_ids(length, seed=length), np.int32)
        assert engine.handle(Submit(spec_of(prompt, sampling, str(number)))) == []
    while engine.has_work():
        engine.step()
    return [entry for entry in journal.entries if isinstance(entry, StepResult)]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=long_unless(name.startswith("Llama")))
        for name in ("LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM")
    ],
)
def test_tokens_are_those_of_other_kernels(architecture: str) -> None:
    graphs = FakeGraphs()
    recorded = answers(architecture, Launched(TritonKernels(BLOCKS)), graphs)
    assert recorded == answers(architecture, PortableKernels(), None)
    assert graphs.replays == 2
