"""Kvell: memory-first LLM serving.

Importing this package is cheap: it loads neither torch nor transformers until
``LLM`` or ``AsyncEngine`` is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvell.release import RELEASE

if TYPE_CHECKING:
    from kvell.async_engine import AsyncEngine as AsyncEngine
    from kvell.async_engine import AsyncEngine as AsyncLLM
    from kvell.async_engine import AsyncEngine as AsyncLLMEngine
    from kvell.async_engine import StreamedOutput as StreamedOutput
    from kvell.engine.arg_utils import EngineArgs as AsyncEngineArgs
    from kvell.engine.arg_utils import EngineArgs as EngineArgs
    from kvell.engine.protocol.pooling import EmbeddingOutput as EmbeddingOutput
    from kvell.engine.protocol.pooling import EmbeddingOutput as EmbeddingRequestOutput
    from kvell.engine.protocol.pooling import EmbeddingOutput as PoolingRequestOutput
    from kvell.engine.protocol.pooling import PoolingParams as PoolingParams
    from kvell.engine.protocol.pooling import ScoringOutput as ScoringOutput
    from kvell.engine.protocol.pooling import ScoringOutput as ScoringRequestOutput
    from kvell.engine.protocol.sampling_params import RequestOutputKind as RequestOutputKind
    from kvell.engine.protocol.sampling_params import SamplingParams as SamplingParams
    from kvell.engine.protocol.structured_outputs import Reasoning as Reasoning
    from kvell.engine.protocol.structured_outputs import StructuredOutputs as StructuredOutputs
    from kvell.engine.requests.beam_search import BeamSearchParams as BeamSearchParams
    from kvell.errors import ChangeSomething as ChangeSomething
    from kvell.errors import RequestFailed as RequestFailed
    from kvell.errors import TryLater as TryLater
    from kvell.errors import UnknownArgument as UnknownArgument
    from kvell.inputs import TextPrompt as TextPrompt
    from kvell.inputs import TokensPrompt as TokensPrompt
    from kvell.llm import LLM as LLM
    from kvell.llm_engine import LLMEngine as LLMEngine
    from kvell.local.outputs import CompletionOutput as CompletionOutput
    from kvell.local.outputs import RequestOutput as RequestOutput

__version__ = RELEASE
__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingParams",
    "PoolingRequestOutput",
    "Reasoning",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamedOutput",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]
MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "BeamSearchParams": "engine.requests.beam_search",
    "ChangeSomething": "errors",
    "CompletionOutput": "local.outputs",
    "EmbeddingOutput": "engine.protocol.pooling",
    "EngineArgs": "engine.arg_utils",
    "LLMEngine": "llm_engine",
    "PoolingParams": "engine.protocol.pooling",
    "Reasoning": "engine.protocol.structured_outputs",
    "RequestFailed": "errors",
    "RequestOutput": "local.outputs",
    "RequestOutputKind": "engine.protocol.sampling_params",
    "SamplingParams": "engine.protocol.sampling_params",
    "ScoringOutput": "engine.protocol.pooling",
    "StreamedOutput": "async_engine",
    "StructuredOutputs": "engine.protocol.structured_outputs",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "TryLater": "errors",
    "UnknownArgument": "errors",
}
"""The module of each public name, which is imported when the name is used."""
SAME = {
    "AsyncEngineArgs": "EngineArgs",
    "AsyncLLM": "AsyncEngine",
    "AsyncLLMEngine": "AsyncEngine",
    "EmbeddingRequestOutput": "EmbeddingOutput",
    "PoolingRequestOutput": "EmbeddingOutput",
    "ScoringRequestOutput": "ScoringOutput",
}
"""vLLM's names of public names."""


def __getattr__(name: str) -> Any:
    own = SAME.get(name, name)
    if own not in MODULES:
        raise AttributeError(f"module 'kvell' has no attribute {name!r}")
    return getattr(import_module(f"kvell.{MODULES[own]}"), own)


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES})
