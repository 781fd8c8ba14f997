"""Scans over pieces against the recurrences themselves, token by token in float64."""

from collections.abc import Callable

import pytest
import torch

from kvell.models.states.delta_scans import ChannelDeltaScan, GatedDeltaScan
from kvell.models.states.scans import ScalarDecayScan, Scan, SelectiveScan

Inputs = tuple[torch.Tensor, ...]
LENGTHS = (1, 5, 64)
H, G, D, N, K, V, C = 6, 2, 5, 7, 4, 3, 9
SCALAR, SELECTIVE = -torch.rand(H) * 2, -torch.rand(C, N) * 2


def selective_inputs(pieces: int, length: int) -> Inputs:
    x, dt = torch.randn(pieces, length, C), torch.rand(pieces, length, C) * 3
    return x, dt, torch.randn(pieces, length, N), torch.randn(pieces, length, N)


def selective_token(state: torch.Tensor, token: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, write, read = token
    state = state * torch.exp(dt[:, None] * SELECTIVE.double()) + (dt * x)[:, None] * write
    return state @ read, state


def scalar_inputs(pieces: int, length: int) -> Inputs:
    x, dt = torch.randn(pieces, length, H, D), torch.rand(pieces, length, H) * 3
    return x, dt, torch.randn(pieces, length, G, N), torch.randn(pieces, length, G, N)


def scalar_token(state: torch.Tensor, token: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    x, dt, write, read = token
    write, read = (v.repeat_interleave(H // G, 0) for v in (write, read))
    decay = torch.exp(dt * SCALAR.double())[:, None, None]
    state = state * decay + (dt[:, None] * x)[:, :, None] * write[:, None, :]
    return (state @ read[:, :, None])[..., 0], state


def delta_inputs(pieces: int, length: int) -> Inputs:
    query, key = (
        torch.nn.functional.normalize(torch.randn(pieces, length, H, K), dim=-1) for _ in "qk"
    )
    value, decay = torch.randn(pieces, length, H, V), -torch.rand(pieces, length, H)
    return query, key, value, decay, torch.rand(pieces, length, H)


def channel_inputs(pieces: int, length: int) -> Inputs:
    query, key, value, _, beta = delta_inputs(pieces, length)
    return query, key, value, -torch.rand(pieces, length, H, K) * 2, beta


def channel_token(state: torch.Tensor, token: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = token
    state = state * torch.exp(decay)[:, :, None]
    return delta_token(state, (query, key, value, torch.zeros_like(beta), beta))


def delta_token(state: torch.Tensor, token: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = token
    state = state * torch.exp(decay)[:, None, None]
    correction = (value - (key[:, None, :] @ state)[:, 0]) * beta[:, None]
    state = state + key[:, :, None] * correction[:, None, :]
    return (query[:, None, :] @ state)[:, 0], state


Token = Callable[[torch.Tensor, Inputs], tuple[torch.Tensor, torch.Tensor]]
KINDS: dict[str, tuple[Scan, Callable[[int, int], Inputs], Token, tuple[int, ...]]] = {
    "selective": (SelectiveScan(SELECTIVE), selective_inputs, selective_token, (C, N)),
    "scalar": (ScalarDecayScan(SCALAR), scalar_inputs, scalar_token, (H, D, N)),
    "channel": (ChannelDeltaScan(), channel_inputs, channel_token, (H, K, V)),
    "delta": (GatedDeltaScan(), delta_inputs, delta_token, (H, K, V)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def token_by_token(
    step: Token,
    inputs: Inputs,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = []
    for place in range(len(inputs[0])):
        output, state = step(state, tuple(values[place] for values in inputs))
        outputs.append(output)
    return torch.stack(outputs), state


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@every_kind
@pytest.mark.parametrize("length", LENGTHS)
def test_pieces_give_what_the_recurrence_gives(kind: str, length: int) -> None:
    scan, draw, step, shape = KINDS[kind]
    inputs, state = draw(3, length), torch.randn(2, *shape)
    prepared = scan.prepare(*inputs)
    outputs, after = prepared(1, 3, state)
    for index in range(2):
        own = tuple(values[index + 1].double() for values in inputs)
        expected, expected_state = token_by_token(step, own, state[index].double())
        assert_close(outputs[index], expected)
        assert_close(after[index], expected_state)


@every_kind
def test_places_without_a_token_leave_the_state_as_it_is(kind: str) -> None:
    scan, draw, _, shape = KINDS[kind]
    inputs, state = draw(1, 6), torch.randn(1, *shape)
    padded = tuple(torch.cat((v, torch.zeros_like(v)), 1) for v in inputs)
    outputs, after = scan.prepare(*inputs)(0, 1, state)
    padded_outputs, padded_after = scan.prepare(*padded)(0, 1, state)
    assert_close(padded_outputs[:, :6], outputs)
    assert_close(padded_after, after)


@every_kind
def test_a_piece_after_another_is_as_one(kind: str) -> None:
    scan, draw, _, shape = KINDS[kind]
    inputs, state = draw(1, 20), torch.randn(1, *shape)
    whole, after = scan.prepare(*inputs)(0, 1, state)
    parts = []
    for part in (slice(0, 7), slice(7, 20)):
        cut = scan.prepare(*(values[:, part] for values in inputs))
        output, state = cut(0, 1, state)
        parts.append(output)
    assert_close(torch.cat(parts, 1), whole)
    assert_close(state, after)


def test_what_is_small_beside_an_earlier_decay_is_not_lost() -> None:
    """A token that forgets all that was, then tokens with decays near one."""
    scan: Scan = ScalarDecayScan(torch.tensor([-1.0]))
    dt = torch.full((1, 64, 1), 1e-3)
    dt[0, 3] = 30_000.0
    x, write = torch.randn(1, 64, 1, 2), torch.randn(1, 64, 1, 3)
    x[0, 3] = 0
    read = torch.randn(1, 64, 1, 3)
    state = torch.randn(1, 1, 2, 3)
    outputs, after = scan.prepare(x, dt, write, read)(0, 1, state)

    def step(old: torch.Tensor, token: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        x_t, dt_t, write_t, read_t = token
        new = old * torch.exp(-dt_t)[:, None, None]
        new = new + (dt_t[:, None] * x_t)[:, :, None] * write_t[:, None]
        return (new @ read_t[:, :, None])[..., 0], new

    own = tuple(values[0].double() for values in (x, dt, write, read))
    expected, expected_state = token_by_token(step, own, state[0].double())
    assert_close(outputs[0, 4:], expected[4:])
    assert_close(after[0], expected_state)


PLACES, HEADS, NUMBERS = 40, 2, 4


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(2, PLACES, *shape)


def decay(*shape: int) -> torch.Tensor:
    return -torch.rand(2, PLACES, *shape)


SCANS: dict[str, tuple[Scan, Callable[[], list[torch.Tensor]], tuple[int, ...]]] = {
    "selective": (
        SelectiveScan(-torch.rand(6, NUMBERS)),
        lambda: [draw(6), torch.rand(2, PLACES, 6), draw(NUMBERS), draw(NUMBERS)],
        (6, NUMBERS),
    ),
    "scalar decay": (
        ScalarDecayScan(-torch.rand(HEADS)),
        lambda: [draw(HEADS, 3), -decay(HEADS), draw(1, NUMBERS), draw(1, NUMBERS)],
        (HEADS, 3, NUMBERS),
    ),
    "gated delta": (
        GatedDeltaScan(),
        lambda: [
            *(draw(HEADS, NUMBERS), draw(HEADS, NUMBERS), draw(HEADS, 3)),
            *(decay(HEADS), torch.rand(2, PLACES, HEADS)),
        ],
        (HEADS, NUMBERS, 3),
    ),
    "delta of channels": (
        ChannelDeltaScan(),
        lambda: [
            *(draw(HEADS, NUMBERS), draw(HEADS, NUMBERS), draw(HEADS, 3)),
            *(decay(HEADS, NUMBERS), torch.rand(2, PLACES, HEADS)),
        ],
        (HEADS, NUMBERS, 3),
    ),
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("place", [0, 1, 15, 16, 17, 30, PLACES - 1])
def test_no_number_goes_back(name: str, place: int) -> None:
    torch.manual_seed(place)
    scan, make, shape = SCANS[name]
    inputs, state = make(), torch.randn(2, *shape)
    sound, _ = scan.prepare(*inputs)(0, 2, state)
    assert sound.isfinite().all()
    for number in range(len(inputs)):
        broken = [each.clone() for each in inputs]
        broken[number][0, place] = torch.nan
        output, after = scan.prepare(*broken)(0, 2, state)
        assert torch.equal(output[0, :place], sound[0, :place]), f"input {number}"
        assert output[0, place:].isnan().flatten(1).any(1)[0], f"input {number}"
        assert torch.equal(output[1], sound[1]), f"input {number}: another request"
        assert after[1].isfinite().all()
