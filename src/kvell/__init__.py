"""Kvell: memory-first LLM serving.

Importing this package is cheap: it loads neither torch nor transformers until
``LLM`` or ``AsyncEngine`` is used.
"""

from typing import TYPE_CHECKING, Any

from kvell.release import RELEASE

if TYPE_CHECKING:
    from kvell.async_engine import AsyncEngine as AsyncEngine
    from kvell.engine.protocol.sampling_params import SamplingParams as SamplingParams
    from kvell.engine.requests.beam_search import BeamSearchParams as BeamSearchParams
    from kvell.llm import LLM as LLM

__version__ = RELEASE
__all__ = ["LLM", "AsyncEngine", "BeamSearchParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from kvell.llm import LLM

        return LLM
    if name == "AsyncEngine":
        from kvell.async_engine import AsyncEngine

        return AsyncEngine
    if name == "SamplingParams":
        from kvell.engine.protocol.sampling_params import SamplingParams

        return SamplingParams
    if name == "BeamSearchParams":
        from kvell.engine.requests.beam_search import BeamSearchParams

        return BeamSearchParams
    raise AttributeError(f"module 'kvell' has no attribute {name!r}")
