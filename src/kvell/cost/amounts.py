"""How much of each operator's work a step holds, from a model's layers and the step's requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvell.cost.work import Work
from kvell.memory import GroupKind, LayerSpec

SCAN_TOKENS = 64
"""Recurrent layers go through a prompt in pieces that end at multiples of so many tokens."""


@dataclass(frozen=True)
class Reach:
    """Layers whose tokens attend to the same earlier tokens.

    :param window_tokens: a token reads the last so many, itself included; 0 for all of them.
    :param is_chunked: it reads those since the last multiple of the window instead.
    """

    layers: int
    window_tokens: int = 0
    is_chunked: bool = False

    def live_tokens(self, tokens: int) -> int:
        """How many of ``tokens`` earlier ones the next token reads."""
        window = self.window_tokens
        if not window:
            return tokens
        return tokens % window if self.is_chunked else min(tokens, window - 1)

    def pairs_before(self, tokens: int) -> int:
        """Pairs of a token and one that it reads, itself included, among the first ``tokens``."""
        window = self.window_tokens
        if not window or (tokens <= window):
            return tokens * (tokens + 1) // 2
        whole = window * (window + 1) // 2
        if self.is_chunked:
            chunks, rest = divmod(tokens, window)
            return chunks * whole + rest * (rest + 1) // 2
        return whole + (tokens - window) * window


@dataclass(frozen=True)
class Amounts:
    """What a step holds.

    :param tokens: that go through the layers.
    :param rows: of logits.
    :param sequences: requests.
    :param prompts: those of them that compute more than one token.
    :param pairs: of query and key, over all layers of attention.
    :param read_tokens: keys and values read, over all layers of attention.
    :param scan_rounds: pieces one after another that recurrent layers compute.
    """

    tokens: int
    rows: int
    sequences: int
    prompts: int
    pairs: int
    read_tokens: int
    scan_rounds: int


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides how much work a step is.

    :param state_layers: layers that keep a state.
    :param token_bytes: that a token stores in layers of full attention.
    :param window_bytes: for each window, the bytes that one token stores in its layers.
    """

    reaches: tuple[Reach, ...]
    state_layers: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    window_bytes: tuple[tuple[int, int], ...] = ()

    def amounts(self, work: Sequence[Work]) -> Amounts:
        """What a step of this work holds."""
        pairs = read = 0
        for reach in self.reaches:
            before, live = reach.pairs_before, reach.live_tokens
            pairs += reach.layers * sum(before(w.start + w.count) - before(w.start) for w in work)
            read += reach.layers * sum(live(w.start) + w.count for w in work)
        return Amounts(
            tokens=sum(w.count for w in work),
            rows=sum(w.num_logits for w in work),
            sequences=len(work),
            prompts=sum(w.count > 1 for w in work),
            pairs=pairs,
            read_tokens=read,
            scan_rounds=_scan_rounds(work) if self.state_layers else 0,
        )

    def stored_bytes(self, tokens: int) -> int:
        """What a request of so many tokens must have to go on: all that a hit must bring."""
        windows = sum(min(tokens, window) * size for window, size in self.window_bytes)
        return tokens * self.token_bytes + windows + (self.state_bytes if tokens else 0)


def shape_of(layers: Iterable[LayerSpec]) -> ModelShape:
    """The shape of a model's text layers; attention to images is left out."""
    text = [layer for layer in layers if layer.kind not in (GroupKind.CROSS, GroupKind.VISION)]
    states = [layer for layer in text if layer.kind is GroupKind.STATE]
    reaching: dict[tuple[int, bool], list[LayerSpec]] = {}
    for layer in text:
        if layer.kind is not GroupKind.STATE:
            bounded = layer.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
            window = layer.window_tokens if bounded else 0
            reaching.setdefault((window, layer.kind is GroupKind.CHUNKED), []).append(layer)
    sizes = {key: sum(one.token_bytes for one in found) for key, found in reaching.items()}
    return ModelShape(
        reaches=tuple(Reach(len(found), *key) for key, found in reaching.items()),
        state_layers=len(states),
        token_bytes=sizes.get((0, False), 0),
        state_bytes=sum(layer.token_bytes for layer in states),
        window_bytes=tuple((window, size) for (window, _), size in sizes.items() if window),
    )


def _scan_rounds(work: Sequence[Work]) -> int:
    """Decodes go together; prompts side by side, as many rounds as the longest has pieces."""
    pieces = [
        -(-(w.start + w.count) // SCAN_TOKENS) - w.start // SCAN_TOKENS for w in work if w.count > 1
    ]
    return max(pieces, default=0) + (len(pieces) < len(work))
