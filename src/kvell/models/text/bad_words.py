"""Texts that an answer may not hold, as the tokens that would spell them."""

from collections.abc import Callable, Iterable, Sequence

from kvell.errors import ChangeSomething


def bad_word_tokens(
    words: Iterable[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, without and with a space before it; equal ones once.

    :param encode: gives a text's token ids, without special tokens.
    :raises ChangeSomething: if a word has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        forms = [tuple(map(int, encode(form))) for form in (bare, f" {bare}")]
        if not all(forms):
            raise ChangeSomething("bad_words", repr(word), "has no tokens", "leave it out")
        sequences |= dict.fromkeys(forms)
    return tuple(sequences)
