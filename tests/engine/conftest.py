"""Small engines over the virtual model."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvell.engine.core.core import EngineCore
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.pooling import Pooling
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.memory import create_core
from kvell.pages.layout import GroupKind, LayerSpec, Layout
from kvell.pages.sizing import plan_layout
from kvell.vocabulary import RequestId

EOS = 49


def make_layout(
    windows: Sequence[int] = (0, 9), num_large: int = 40, page_tokens: int = 4
) -> Layout:
    """One layer per window (0: full attention), in a pool of this many large pages."""
    layers = [
        LayerSpec(i, GroupKind.SLIDING if w else GroupKind.FULL, 1 + i, 8, 2, w)
        for i, w in enumerate(windows)
    ]
    large = plan_layout(layers, 1 << 20, page_tokens=page_tokens).large_page_bytes
    return plan_layout(layers, large * num_large, page_tokens=page_tokens)


def make_submit(
    name: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    salt: str = "",
    ignore_eos: bool = True,
    pooling: Pooling = "",
    presence_penalty: float = 0.0,
) -> Submit:
    sampling = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        presence_penalty=presence_penalty,
    )
    ids = np.asarray(prompt, "<i4").tobytes()
    return Submit(RequestSpec(RequestId(name), ids, sampling, cache_salt=salt, pooling=pooling))


def make_engine_core(layout: Layout, limits: Limits | None = None) -> EngineCore:
    chosen = limits or Limits(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=64,
        vocab_size=50,
        min_chunk_tokens=4,
    )
    return EngineCore(create_core(layout), chosen, frozenset({EOS}))


@pytest.fixture
def engine_core() -> Callable[..., EngineCore]:
    return make_engine_core
