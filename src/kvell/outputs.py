"""Outputs of requests, by the names of vLLM's module."""

from kvell.engine.protocol.pooling import EmbeddingOutput, ScoringOutput
from kvell.local.outputs import CompletionOutput, RequestMetrics, RequestOutput

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]

EmbeddingRequestOutput = EmbeddingOutput
PoolingOutput = PoolingRequestOutput = EmbeddingOutput
ScoringRequestOutput = ScoringOutput
