from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import TokenizersBackend

from kvell.models.text.tokenizer import Tokenizer

TRICKY = "Zürich 東京 ☕️ 👩‍👩‍👧 naïve\n\t— مرحبا 한국어 𝔘𝔫𝔦"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_fallback_tokenizer() -> Tokenizer:
    """A tokenizer of the sentencepiece kind: spaces as ▁, unknown characters as byte tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("<unk>", "<s>", "▁", "▁the", "▁cat", "s", "é", "▁▁", "Hi", REPLACEMENT):
        vocab[word] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.add_special_tokens(["<s>"])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(TokenizersBackend(tokenizer_object=raw), frozenset())


BYTE_FALLBACK = byte_fallback_tokenizer()
