"""Parameters of requests, by the names of vLLM's module."""

from kvell.engine.protocol.sampling_params import RequestOutputKind, SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.beam_search import BeamSearchParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
]

StructuredOutputsParams = StructuredOutputs
GuidedDecodingParams = StructuredOutputs
