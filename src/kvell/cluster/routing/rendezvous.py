"""Rendezvous hashing (highest random weight; Thaler and Ravishankar, 1998).

Each pair of a session and an instance has a fixed weight, and a session belongs to the instance
with which its weight is highest.  An instance that comes takes only sessions that are its own from
then on, and one that goes leaves only its own to the others.
"""

import hashlib
from collections.abc import Iterable

KEY = b"kvell: sessions to instances"
"""Part of the contract: with another key all sessions would move."""
WEIGHT_BYTES = 8


def weight(session: str, instance_id: str) -> int:
    """Return the weight of a pair; it is the same in every process and on every machine."""
    # The length keeps the pairs ("ab", "c") and ("a", "bc") apart.
    text = f"{len(instance_id)}:{instance_id}{session}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=WEIGHT_BYTES, key=KEY).digest()
    return int.from_bytes(digest, "big")


def owner(session: str, instance_ids: Iterable[str]) -> str:
    """Return the instance that a session belongs to; there must be at least one."""
    return max(instance_ids, key=lambda instance_id: (weight(session, instance_id), instance_id))
