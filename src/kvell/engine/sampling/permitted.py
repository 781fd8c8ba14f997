"""The tokens that a request's lists permit next: allowed tokens and bad words."""

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.sampling.adjust import Ints
from kvell.engine.sampling.grammars import Allowed


def permitted_tokens(
    params: SamplingParams, output: Ints, vocab_size: int, allowed: Allowed | None = None
) -> Allowed:
    """Return the tokens that are permitted next, bool [vocabulary].

    :param output: the request's tokens after its prompt.
    :param allowed: the tokens that a grammar allows; None for all.
    """
    permitted = np.ones(vocab_size, bool) if allowed is None else allowed.copy()
    if params.allowed_token_ids is not None:
        listed = np.zeros(vocab_size, bool)
        listed[_array(params.allowed_token_ids)] = True
        permitted &= listed
    for *before, last in params.bad_words_token_ids:
        # The first tokens of a word are permitted: another word may begin with them.
        if not before or output[-len(before) :].tolist() == before:
            permitted[last] = False
    return permitted


def _array(tokens: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.fromiter(tokens, np.int64, len(tokens))
