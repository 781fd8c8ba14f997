"""``kvell cluster``: for operators, the instances of a running server."""
