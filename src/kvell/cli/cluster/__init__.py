"""``kvell cluster``: the instances of a running server, for operators."""
