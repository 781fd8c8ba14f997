"""Random large bodies within the bounds of every route, against a real server."""

from itertools import islice

from bench.server.hostile.bodies import MOST_BODY_BYTES, hostile_bodies

ROUTES = 10


def test_a_seed_yields_the_same_bodies_for_every_route() -> None:
    first, again = (list(islice(hostile_bodies(7), 60)) for _ in range(2))
    assert first == again != list(islice(hostile_bodies(8), 60))
    assert len({request.path for request in first}) >= ROUTES
    assert all(len(request.body) <= MOST_BODY_BYTES for request in first)
