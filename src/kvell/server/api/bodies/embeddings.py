"""The body of ``/v1/embeddings``."""

from base64 import b64encode
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvell.server.api.bodies.completions import Body, Lazy, usage_body
from kvell.server.api.schemas.embeddings import Encoding
from kvell.server.text.text_stream import Usage

LEAST_LENGTH = 1e-12


def cut_to(vector: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the first ``size`` numbers of a vector, normalized to length one if it is cut."""
    if size == len(vector):
        return vector
    part = vector[:size]
    length = max(float(np.linalg.norm(part)), LEAST_LENGTH)
    cut: NDArray[np.float32] = part / np.float32(length)
    return cut


def embeddings_body(
    model: str, vectors: Iterable[NDArray[np.float32]], encoding: Encoding, usage: Usage
) -> Body:
    data = (
        {"object": "embedding", "index": index, "embedding": _written(vector, encoding)}
        for index, vector in enumerate(vectors)
    )
    return {"object": "list", "data": Lazy(data), "model": model, "usage": embeddings_usage(usage)}


def embeddings_usage(usage: Usage) -> Body:
    """Return the ``usage`` of an answer without output tokens."""
    body = usage_body(usage)
    return {k: body[k] for k in ("prompt_tokens", "total_tokens", "prompt_tokens_details")}


def _written(vector: NDArray[np.float32], encoding: Encoding) -> str | NDArray[np.float32]:
    """Return a vector in base64 of little-endian float32, or its numbers."""
    if encoding == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    return vector


def scores_body(
    answer_id: str, created: int, model: str, scores: Sequence[float], usage: Usage
) -> Body:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = {"id": answer_id, "object": "list", "created": created, "model": model}
    return {**head, "data": data, "usage": embeddings_usage(usage)}


def rerank_body(
    answer_id: str,
    model: str,
    scores: Sequence[float],
    documents: Sequence[str],
    usage: Usage,
    *,
    limit: int,
    tells_documents: bool,
) -> Body:
    """Return the documents, the most relevant first; equal ones keep their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:limit]
    results = [
        {
            "index": index,
            **({"document": {"text": documents[index]}} if tells_documents else {}),
            "relevance_score": scores[index],
        }
        for index in order
    ]
    return {"id": answer_id, "model": model, "usage": embeddings_usage(usage), "results": results}
