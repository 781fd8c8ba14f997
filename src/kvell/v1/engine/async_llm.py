"""The engine for asyncio, by the names of vLLM's module."""

from kvell.async_engine import AsyncEngine

__all__ = ["AsyncLLM"]

AsyncLLM = AsyncEngine
