"""The whole engine on the GPU against transformers on the CPU, in float32, and how fast it is.

Tiny models with random weights whose outputs vary: full attention, sliding windows, and
states beside attention.  Logits must be within 1e-4 of the largest, memory is audited
after every step.
"""

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from transformers import LlamaConfig

from bench.gpu.place import Place
from bench.gpu.report import Row, check
from bench.gpu.sizes import sizes_of
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.protocol.messages import Finished
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.vocabulary import GIB, KIB, MIB
from tests.models.harness import prompt_ids, tiny_module
from tests.models.random_model import random_paged_model
from tests.models.served import Recorder, Served, assert_all

FAMILIES = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "JambaForCausalLM",
    "Qwen3NextForCausalLM",
    "Lfm2ForCausalLM",
)
TIGHT_BYTES = {"LlamaForCausalLM": 224 * KIB, "Gemma3ForCausalLM": 224 * KIB}
"""Pool sizes that cannot hold three requests."""


class _OnHost(Recorder):
    """Records logits on the CPU, where the oracle is."""

    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        """Run the model and record its logits; see :class:`PagedModel`."""
        logits = super().forward(batch, callbacks)
        self.logits = logits.cpu()
        return logits


class OnDevice(Served):
    """The tests' served model, on any device."""

    def __init__(
        self,
        architecture: str,
        place: Place,
        kv_bytes: int = 8 * MIB,
        kv_dtype: torch.dtype = torch.float32,
        *,
        records: bool = False,
    ) -> None:
        """:param records: record decode steps."""
        self.architecture = architecture
        module = copy.deepcopy(tiny_module(architecture)).to(place.device)
        description = describe_as(module.config, torch.float32, kv_dtype)
        kernels = place.recorded_kernels() if records else place.engine_kernels()
        model = PagedModel(module, description, kernels, kv_dtype)
        self.recorder = _OnHost(model)
        options = EngineOptions(
            kv_memory_bytes=kv_bytes,
            max_model_len=256,
            max_num_batched_tokens=64,
            async_scheduling=False,
        )
        self.engine = build_engine(
            self.recorder,  # type: ignore[arg-type]
            architecture,
            options,
            graphs=place.graphs() if records else None,
        )
        self.answers = {}


def recorded(architecture: str, place: Place) -> str:
    """Check the same with recorded decode steps."""
    return answers(architecture, place, records=True)


def answers(architecture: str, place: Place, *, records: bool = False) -> str:
    """Check a batch, a prefix that hits, and a longer prompt."""
    served = OnDevice(architecture, place, records=records)
    for name, length in (("a", 70), ("b", 9), ("c", 130)):
        served.submit(name, prompt_ids(length, seed=length), outputs=12)
    served.run()
    again = served.ask("again", prompt_ids(130, seed=130), outputs=12)
    longer = served.ask("longer", prompt_ids(130, seed=130) + prompt_ids(20, seed=5), outputs=6)
    third = served.ask("third", prompt_ids(130, seed=130) + prompt_ids(25, seed=6), outputs=6)
    assert_all(served)
    hits = [each.cached_tokens for each in (again, longer, third)]
    assert max(hits) > 0, "no prefix was found again"
    assert again.output == served.answers["c"].output, "a hit changed an answer"
    return f"exact; hits of {hits} tokens"


def preempted(architecture: str, place: Place) -> str:
    """Check more requests than the pool holds: some wait, some are computed twice."""
    served = OnDevice(architecture, place, TIGHT_BYTES[architecture])
    for index in range(4):
        served.submit(str(index), prompt_ids(40, seed=index), outputs=60)
    served.run()
    assert_all(served)
    count = sum(each.finished.preemptions for each in served.answers.values() if each.finished)
    assert count > 0, "nothing was preempted"
    return f"exact; {count} preemptions"


def exact(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Yield a row for every ``of``-th check."""
    place = Place.of(pretends)
    tasks: list[tuple[Callable[[str, Place], str], str]]
    tasks = [(way, name) for way in (answers, recorded) for name in FAMILIES]
    tasks += [(preempted, name) for name in TIGHT_BYTES]
    for run, architecture in tasks[part::of]:
        name = f"engine, {architecture}, {run.__name__}"
        yield check(name, partial(run, architecture, place))


def throughput(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Time steps of a random llama of 8 wide layers, bf16, through the whole engine: computed, then
    recorded, then started one ahead."""
    for records, ahead in ((False, False), (True, False), (True, True)):
        yield timed_steps(Place.of(pretends), records=records, ahead=ahead)


def timed_steps(place: Place, *, records: bool, ahead: bool) -> Row:
    """Time the steps of one way."""
    pretends = place.pretends
    requests, prompt, outputs = sizes_of(pretends).engine
    model = random_paged_model(
        timed_config(pretends),
        place.recorded_kernels() if records else place.kernels(),
        dtype=place.dtype,
        device=place.device,
        scale=1.0,
    )
    engine = build_engine(
        model,
        "speed",
        EngineOptions(
            kv_memory_bytes=64 * MIB if pretends else 4 * GIB,
            max_model_len=4096,
            max_num_batched_tokens=8192,
            async_scheduling=ahead,
        ),
        graphs=place.graphs() if records else None,
    )
    served = Served.__new__(Served)
    served.engine, served.answers = engine, {}
    steps: list[float] = []
    events: list[object] = []
    for index in range(requests):
        served.submit(str(index), prompt_ids(prompt, index, 31_000), outputs)
    while engine.has_work():
        if not ahead:
            place.wait()
        begin = time.perf_counter()
        events += engine.step()
        steps.append(time.perf_counter() - begin)
    failed = [end for end in events if isinstance(end, Finished) and end.reason != "length"]
    if failed:
        raise RuntimeError(f"requests failed: {failed[0].message or failed[0].reason}")
    decodes = sorted(steps[-outputs // 2 :])
    return {
        "kind": "engine",
        "records": records,
        "ahead": ahead,
        "requests": requests,
        "prompt": prompt,
        "prefill_tokens_per_second": requests * prompt / sum(steps[: -outputs + 1]),
        "decode_step_seconds": decodes[len(decodes) // 2],
        "decode_tokens_per_second": requests / decodes[len(decodes) // 2],
    }


def timed_config(pretends: bool) -> LlamaConfig:
    """Return the model whose steps are timed; a tiny one where a CPU pretends."""
    width = 64 if pretends else 2048
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2 if pretends else 8,
        num_attention_heads=4 if pretends else 32,
        num_key_value_heads=2 if pretends else 8,
        head_dim=16 if pretends else 64,
        max_position_embeddings=4096,
    )
