"""Kvell: memory-first LLM serving.

Importing this package is cheap: it loads neither torch nor transformers until
``LLM`` or ``AsyncEngine`` is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvell.release import RELEASE

if TYPE_CHECKING:
    from kvell.async_engine import AsyncEngine as AsyncEngine
    from kvell.async_engine import StreamedOutput as StreamedOutput
    from kvell.engine.protocol.pooling import EmbeddingOutput as EmbeddingOutput
    from kvell.engine.protocol.sampling_params import SamplingParams as SamplingParams
    from kvell.engine.protocol.structured_outputs import Reasoning as Reasoning
    from kvell.engine.protocol.structured_outputs import StructuredOutputs as StructuredOutputs
    from kvell.engine.requests.beam_search import BeamSearchParams as BeamSearchParams
    from kvell.errors import ChangeSomething as ChangeSomething
    from kvell.errors import RequestFailed as RequestFailed
    from kvell.errors import TryLater as TryLater
    from kvell.llm import LLM as LLM
    from kvell.llm_outputs import CompletionOutput as CompletionOutput
    from kvell.llm_outputs import RequestOutput as RequestOutput

__version__ = RELEASE
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "Reasoning",
    "RequestOutput",
    "SamplingParams",
    "StreamedOutput",
    "StructuredOutputs",
    "__version__",
]
MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "BeamSearchParams": "engine.requests.beam_search",
    "ChangeSomething": "errors",
    "CompletionOutput": "llm_outputs",
    "EmbeddingOutput": "engine.protocol.pooling",
    "Reasoning": "engine.protocol.structured_outputs",
    "RequestFailed": "errors",
    "RequestOutput": "llm_outputs",
    "SamplingParams": "engine.protocol.sampling_params",
    "StreamedOutput": "async_engine",
    "StructuredOutputs": "engine.protocol.structured_outputs",
    "TryLater": "errors",
}
"""The module of each public name, which is imported when the name is used."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'kvell' has no attribute {name!r}")
    return getattr(import_module(f"kvell.{MODULES[name]}"), name)
