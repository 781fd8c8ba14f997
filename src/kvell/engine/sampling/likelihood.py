"""Logprobs of tokens: logarithms of the softmax of a model's logits."""

import torch

from kvell.engine.protocol.logprobs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Return the logprobs of a token under one row of logits.

    :param logits: float32 [vocabulary], unchanged from the model.
    :param num_top: number of the likeliest tokens to report.
    """
    [logprobs] = all_token_logprobs(logits[None], [token], num_top)
    return logprobs


def all_token_logprobs(
    logits: torch.Tensor, tokens: list[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Return the logprobs of one token under each row of logits, float32 [n, vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(num_top, -1) if num_top else (logprobs[:, :0], logprobs[:, :0])
    return tuple(
        TokenLogprobs(logprob, rank, tuple(zip(map(int, top_ids), top, strict=True)))
        for logprob, rank, top_ids, top in zip(
            chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    )
