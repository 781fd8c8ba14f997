"""Amounts of each operator's work in a step, from a model's layers and the step's requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvell.cost.work import Work
from kvell.memory import GroupKind, LayerSpec

SCAN_TOKENS = 64
"""Size of the pieces of a prompt in recurrent layers; pieces end at multiples of it."""


@dataclass(frozen=True)
class AttentionSpan:
    """Layers whose tokens attend to the same earlier tokens.

    :param window_tokens: number of last tokens that a token reads, itself included; 0 for all.
    :param is_chunked: a token reads those since the last multiple of the window instead.
    """

    layers: int
    window_tokens: int = 0
    is_chunked: bool = False

    def live_tokens(self, tokens: int) -> int:
        window = self.window_tokens
        if not window:
            return tokens
        return tokens % window if self.is_chunked else min(tokens, window - 1)

    def pairs_before(self, tokens: int) -> int:
        """Return the pairs of a token and one that it reads, itself included, among ``tokens``."""
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
    """The work of a step, by operator.

    :param tokens: that pass through the layers.
    :param prompts: requests that compute more than one token.
    :param pairs: of query and key, over all layers of attention.
    :param read_tokens: keys and values read, over all layers of attention.
    :param scan_rounds: pieces that recurrent layers compute one after another.
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
    """The facts about a model that decide a step's work.

    :param state_layers: number of layers that keep a state.
    :param token_bytes: that a token stores in layers of full attention.
    :param window_bytes: for each window, the bytes that one token stores in its layers.
    """

    reaches: tuple[AttentionSpan, ...]
    state_layers: int = 0
    token_bytes: int = 0
    state_bytes: int = 0
    window_bytes: tuple[tuple[int, int], ...] = ()

    @property
    def asking_layers(self) -> int:
        return sum(reach.layers for reach in self.reaches if not reach.window_tokens)

    def amounts(self, work: Sequence[Work]) -> Amounts:
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
        """Return the bytes that a request of ``tokens`` needs to continue: the bytes of its hit."""
        windows = sum(min(tokens, window) * size for window, size in self.window_bytes)
        return tokens * self.token_bytes + windows + (self.state_bytes if tokens else 0)


def shape_of(layers: Iterable[LayerSpec]) -> ModelShape:
    """Return the shape of a model's text layers; attention to images is left out."""
    text = [layer for layer in layers if layer.kind not in (GroupKind.CROSS, GroupKind.VISION)]
    states = [layer for layer in text if layer.kind is GroupKind.STATE]
    reaching: dict[tuple[int, bool], list[LayerSpec]] = {}
    for layer in text:
        if layer.kind is not GroupKind.STATE:
            bounded = layer.kind in (GroupKind.SLIDING, GroupKind.CHUNKED)
            window = layer.window_tokens if bounded else 0
            reaching.setdefault((window, layer.kind is GroupKind.CHUNKED), []).append(layer)
    sizes = {key: sum(spec.token_bytes for spec in members) for key, members in reaching.items()}
    return ModelShape(
        reaches=tuple(AttentionSpan(len(members), *key) for key, members in reaching.items()),
        state_layers=len(states),
        token_bytes=sizes.get((0, False), 0),
        state_bytes=sum(layer.token_bytes for layer in states),
        window_bytes=tuple((window, size) for (window, _), size in sizes.items() if window),
    )


def _scan_rounds(work: Sequence[Work]) -> int:
    pieces = [
        -(-(w.start + w.count) // SCAN_TOKENS) - w.start // SCAN_TOKENS for w in work if w.count > 1
    ]
    return max(pieces, default=0) + (len(pieces) < len(work))
