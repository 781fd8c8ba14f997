"""The engine that the caller steps, by the names of vLLM's module."""

from kvell.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
