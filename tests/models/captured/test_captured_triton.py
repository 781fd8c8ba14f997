"""Records with Triton's kernels, which read from memory how much work there is."""

import pytest

from kvell.attention.interface import AttentionKernels
from kvell.engine.requests.plan import StepResult
from kvell.vocabulary import MIB
from tests.models.captured.fake_graphs import FakeGraphs
from tests.models.captured.served import Served
from tests.models.cases import long_unless
from tests.models.harness import prompt_ids

pytest.importorskip("triton", reason="Triton is not made for this system")

from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.sizes import Blocks

BLOCKS = (Blocks(16, 16, 4, 1, section_tokens=32), Blocks(32, 16, 4, 1))


def answers(
    architecture: str, kernels: AttentionKernels | None, graphs: FakeGraphs | None
) -> list[StepResult]:
    """Results of the steps of two requests, which end one after the other."""
    served = Served(architecture, graphs, 0, 8 * MIB, max_model_len=64, kernels=kernels)
    for number, length in enumerate((18, 6)):
        served.submit(str(number), prompt_ids(length, seed=length), 2 + number, 0.0)
    served.run()
    return [entry for entry in served.journal.entries if isinstance(entry, StepResult)]


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=long_unless(name.startswith("Llama")))
        for name in ("LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM")
    ],
)
def test_tokens_are_those_of_other_kernels(architecture: str) -> None:
    graphs = FakeGraphs()
    recorded = answers(architecture, TritonKernels(BLOCKS), graphs)
    assert recorded == answers(architecture, None, None)
    assert graphs.replays == 2
