"""The bodies of ``/score`` and ``/rerank``."""

from collections.abc import Sequence

from kvell.server.api.bodies.completions import Body
from kvell.server.api.bodies.embeddings import embeddings_usage
from kvell.server.text.text_stream import Usage


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
    """Return the documents, the most relevant first; equal ones keep their order.

    :param limit: number of documents to return.
    """
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
