"""Bodies that a hostile peer sends."""

LATIN = "Müller".encode("latin-1")

HOSTILE = {
    "nothing": b"",
    "half a message": b"\x93\x01",
    "a text that is not UTF-8": bytes((0xA0 | len(LATIN),)) + LATIN,
    "a key that is not UTF-8": bytes((0x81, 0xA0 | len(LATIN))) + LATIN + b"\x01",
    "lists in lists": b"\x91" * 4000,
    "a list of four billion": b"\xdd\xff\xff\xff\xff",
    "a text of four billion": b"\xdb\xff\xff\xff\xff",
    "a time beyond all": b"\xc7\x0c\xff" + b"\xff" * 12,
    "two messages": b"\x01\x01",
    "JSON that is not UTF-8": b'{"' + LATIN + b'": "' + LATIN + b'"}',
    "JSON in JSON": b"[" * 4000,
    "a number beyond all": b"9" * 5000,
}
