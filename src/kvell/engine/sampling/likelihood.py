"""How likely tokens are: logarithms of the softmax of a model's logits."""

import torch

from kvell.engine.protocol.logprobs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token: int, most: int) -> TokenLogprobs:
    """How likely a token is under one row of logits.

    :param logits: float32 [vocabulary], as the model gave them.
    :param most: number of the likeliest tokens to tell of.
    """
    [told] = all_token_logprobs(logits[None], [token], most)
    return told


def all_token_logprobs(
    logits: torch.Tensor, tokens: list[int], most: int
) -> tuple[TokenLogprobs, ...]:
    """The same for one token under each row of logits, float32 [n, vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.topk(most, -1) if most else (logprobs[:, :0], logprobs[:, :0])
    return tuple(
        TokenLogprobs(one, rank, tuple(zip(map(int, top_ids), top, strict=True)))
        for one, rank, top_ids, top in zip(
            own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
    )
