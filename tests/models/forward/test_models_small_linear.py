"""The compiled linear for few rows, and the module that takes a linear's place."""

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kvell.attention.portable import PortableKernels
from kvell.models.forward import small_linear as subject
from kvell.models.forward.small_linear import (
    FASTER_SETS,
    MAX_ROWS,
    ONE_THREAD_BYTES,
    SmallBatchLinear,
    instruction_sets,
    small_linear,
    use_small_linears,
)
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.random_weights import random_module, write_random_model
from kvell.models.paged_model import PagedModel
from tests.depth import some
from tests.models.cases import some_fast
from tests.models.harness import oracle_logits, runner_over, tiny_config
from tests.models.random_model import random_paged_model
from tests.models.rounding import DENORMALS_ARE_ZEROS, bits_of, hard_numbers, rounded_bits

BF16_ROUNDING = 2.0**-8
FLOAT32_SUM = 2.0**-20
SHAPES = [(1, 1), (31, 3), (32, 4), (33, 5), (64, 7), (576, 192), (577, 33), (1000, 130), (40, 257)]

_linear = pytest.importorskip(
    "kvell.models.forward._linear", reason="these tests are of compiled code"
)

SETS = instruction_sets()
each_set = pytest.mark.parametrize("instruction_set", some_fast(SETS, (SETS[0], "portable")))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded_once(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """As near to the exact result as one rounding to bfloat16 and float32 sums allow."""
    shift = torch.zeros(len(weight)).double() if bias is None else bias.double()
    exact = x.double() @ weight.double().T + shift
    size = x.double().abs() @ weight.double().abs().T + shift.abs()
    assert y.dtype == torch.bfloat16
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= BF16_ROUNDING * exact.abs() + FLOAT32_SUM * size).all()


@each_set
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 16, 33])
def test_is_the_exact_result_rounded_once(instruction_set: str, rows: int) -> None:
    for width, out in SHAPES:
        x, weight, bias = random(rows, width), random(out, width, seed=1), random(out, seed=2)
        assert_rounded_once(small_linear(x, weight, None, instruction_set), x, weight)
        assert_rounded_once(small_linear(x, weight, bias, instruction_set), x, weight, bias)


@each_set
def test_is_rounded_as_torch_rounds(instruction_set: str) -> None:
    """A sum of an operand and a bias: ties, infinities, what is not a number, denormal numbers."""
    flushes = instruction_set in DENORMALS_ARE_ZEROS
    one = torch.ones(1, 1).bfloat16()
    upper = hard_numbers().view(torch.int32) & -65536
    bias = upper.view(torch.float32).bfloat16()
    for x in (0.0, 2.0**-8, -(2.0**-9), 2.0**119, -float("inf")):
        added = torch.tensor([[x]]).bfloat16()
        y = small_linear(added, one.expand(len(bias), 1).contiguous(), bias, instruction_set)
        sums = added[0].float() + bias.float()
        known = ~(added[0].isnan() | sums.isnan() & ~bias.isnan())  # whose sign is the processor's
        assert torch.equal(bits_of(y[0])[known], rounded_bits(sums, flushes)[known])
        assert torch.equal(y[0].isnan(), sums.isnan())


@some()
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 150),
    out=st.integers(1, 150),
    biased=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_sizes(rows: int, width: int, out: int, biased: bool, threads: int, seed: int) -> None:
    x, weight = random(rows, width, seed=seed), random(out, width, seed=seed + 1)
    bias = random(out, seed=seed + 2) if biased else None
    for instruction_set in instruction_sets():
        y = small_linear(x, weight, bias, instruction_set, threads)
        assert_rounded_once(y, x, weight, bias)


@each_set
def test_rows_do_not_change_each_other(instruction_set: str) -> None:
    for width, out in ((576, 50), (45, 9)):
        x, weight = random(MAX_ROWS + 1, width), random(out, width, seed=1)
        alone = torch.cat([small_linear(row[None], weight, None, instruction_set) for row in x])
        for rows in range(1, len(x) + 1):
            assert torch.equal(small_linear(x[:rows], weight, None, instruction_set), alone[:rows])


@each_set
def test_columns_do_not_change_each_other(instruction_set: str) -> None:
    x, weight = random(5, 100), random(41, 100, seed=1)
    together = small_linear(x, weight, None, instruction_set)
    for column in range(len(weight)):
        alone = small_linear(x, weight[column : column + 1], None, instruction_set)
        assert torch.equal(alone[:, 0], together[:, column])


@each_set
@pytest.mark.parametrize("out", [31, 64, 65, 1000])
def test_threads_change_no_bit(instruction_set: str, out: int) -> None:
    x, weight, bias = random(7, 300), random(out, 300, seed=1), random(out, seed=2)
    one = small_linear(x, weight, bias, instruction_set, 1)
    for threads in (2, 3, 0):
        assert torch.equal(small_linear(x, weight, bias, instruction_set, threads), one)


@each_set
def test_strides_of_x(instruction_set: str) -> None:
    weight, wide = random(37, 70, seed=1), random(12, 150)
    views = (
        wide[:, 41:111],
        wide[::3, :70],
        wide[:1, :70].expand(6, 70),
        random(70, 9).T,
        wide[:, ::2][:, :70],
        wide.view(2, 3, 2, 150)[:, 1:, :, 5:75],
        wide[4, :70],
    )
    for x in views:
        assert_rounded_once(small_linear(x, weight, None, instruction_set), x, weight)


@each_set
def test_reads_nothing_outside_its_operands(instruction_set: str) -> None:
    """NaN all around; rows of x lie in the middle of longer ones."""
    rows, width, out = 3, 37, 11
    around = torch.full((rows, width + 64), float("nan")).bfloat16()
    around[:, 32 : 32 + width] = random(rows, width)
    memory = torch.full((out * width + 128,), float("nan")).bfloat16()
    memory[64 : 64 + out * width] = random(out * width, seed=1)
    x, weight = around[:, 32 : 32 + width], memory[64 : 64 + out * width].view(out, width)
    assert_rounded_once(small_linear(x, weight, None, instruction_set), x, weight)


@each_set
@pytest.mark.parametrize("out", [1, 3, 4, 6, 33])
def test_writes_nothing_outside_its_result(instruction_set: str, out: int) -> None:
    x, weight = random(5, 40), random(out, 40, seed=1)
    y = torch.full((7, out + 40), 7.0).bfloat16()
    arguments = (out, 40, 5, 40, y.stride(0), 2)
    first = y[1:, 8:].data_ptr()
    pointers = (weight.data_ptr(), 0, x.data_ptr(), first)
    _linear.linear(instruction_set, *pointers, *arguments)
    assert torch.equal(y[1:6, 8 : 8 + out], small_linear(x, weight, None, instruction_set))
    y[1:6, 8 : 8 + out] = 7.0
    assert (y == 7.0).all()


@each_set
def test_what_is_not_finite_stays_in_its_row(instruction_set: str) -> None:
    x, weight = random(6, 50), random(10, 50, seed=1)
    clean = small_linear(x, weight, None, instruction_set)
    x[2, 49], x[4, 0] = float("nan"), float("inf")
    y = small_linear(x, weight, None, instruction_set)
    assert y[2].isnan().all()
    assert torch.equal(y[4].float(), torch.sign(weight[:, 0].float()) * float("inf"))
    assert torch.equal(y[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@each_set
def test_ties_round_to_even(instruction_set: str) -> None:
    """1 + 2^-8 lies midway between two bfloat16, and so does 1 + 3 · 2^-8."""
    x = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8]]).bfloat16()
    y = small_linear(x, torch.ones(1, 2).bfloat16(), None, instruction_set)
    assert y.flatten().tolist() == [1.0, 1.0 + 4 * 2.0**-8]


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="abacus"):
        small_linear(random(2, 8), random(4, 8), None, "abacus")


def test_no_rows_give_no_rows() -> None:
    assert small_linear(random(0, 8), random(4, 8), None, SETS[0]).shape == (0, 4)


def linear(width: int = 70, out: int = 37, bias: bool = True) -> nn.Linear:
    return nn.Linear(width, out, bias, dtype=torch.bfloat16).requires_grad_(False)


def test_module_runs_the_kernel_up_to_its_rows_and_torch_beyond() -> None:
    module = linear()
    small = SmallBatchLinear(module)
    for rows in (1, MAX_ROWS):
        x = random(rows, 70)
        assert torch.equal(small(x), small_linear(x, module.weight, module.bias, SETS[0]))
    x = random(MAX_ROWS + 1, 70)
    assert torch.equal(small(x), functional.linear(x, module.weight, module.bias))


def test_which_calls_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = subject.small_linear

    def counted(x: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(x.shape[-2])
        return real(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(subject, "small_linear", counted)
    small = SmallBatchLinear(linear())
    for rows in (1, MAX_ROWS, MAX_ROWS + 1, 0):
        assert small(random(1, rows, 70)).shape == (1, rows, 37)
    assert calls == [1, MAX_ROWS]


def test_module_keeps_the_shape_before_the_last_dimension() -> None:
    module = linear()
    x = random(2, 3, 70)
    y = SmallBatchLinear(module)(x)
    assert y.shape == (2, 3, 37)
    assert_rounded_once(y.view(6, 37), x.view(6, 70), module.weight, module.bias)


def test_gradients_flow_through_torch() -> None:
    module = linear().requires_grad_(True)
    SmallBatchLinear(module)(random(2, 70)).float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.abs().max() > 0


def test_other_dtypes_are_torchs_to_run_or_refuse() -> None:
    small = SmallBatchLinear(linear())
    with pytest.raises(RuntimeError):
        small(random(2, 70).float())
    with pytest.raises(RuntimeError):
        small(random(2, 35))
    with pytest.raises(RuntimeError):
        mixed = SmallBatchLinear(linear())
        mixed.bias = nn.Parameter(mixed.bias.float(), requires_grad=False)
        mixed(random(2, 70))
    x = random(2, 70).float()
    wide = small.float()
    assert torch.equal(wide(x), functional.linear(x, wide.weight, wide.bias))


def test_a_copy_has_weights_of_its_own() -> None:
    small = SmallBatchLinear(linear())
    x = random(2, 70)
    before = small(x)
    twin = copy.deepcopy(small)
    small.weight.zero_()
    assert torch.equal(twin(x), before)


def test_small_weights_get_one_thread() -> None:
    width = 512
    below = linear(width, ONE_THREAD_BYTES // 2 // width - 1)
    assert SmallBatchLinear(below).num_threads == 1
    assert SmallBatchLinear(linear(width, ONE_THREAD_BYTES // 2 // width)).num_threads == 0


def llama(**changes: object) -> nn.Module:
    module: nn.Module = random_module(
        tiny_config("LlamaForCausalLM", **changes), seed=3, dtype=torch.bfloat16
    )
    return module


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swap on every processor."""
    monkeypatch.setattr(subject, "FASTER_SETS", instruction_sets())


@pytest.mark.usefixtures("faster")
def test_swap_keeps_parameters_names_and_ties() -> None:
    module = llama()
    module.lm_head.weight = module.model.embed_tokens.weight  # type: ignore[union-attr]
    names = list(module.state_dict())
    parameters = {name: id(p) for name, p in module.named_parameters()}
    assert use_small_linears(module) == 3 * 7 + 1
    assert list(module.state_dict()) == names
    assert {name: id(p) for name, p in module.named_parameters()} == parameters
    assert module.lm_head.weight is module.model.embed_tokens.weight  # type: ignore[union-attr]
    assert all(type(m) is not nn.Linear for m in module.modules())
    assert use_small_linears(module) == 0


@pytest.mark.usefixtures("faster")
def test_a_linear_in_two_places_stays_one() -> None:
    shared = linear(8, 8)
    module = nn.ModuleDict({"first": shared, "again": nn.Sequential(shared, linear(8, 8))})
    assert use_small_linears(module) == 2
    assert module["first"] is module["again"][0]  # type: ignore[index]


@pytest.mark.usefixtures("faster")
def test_swap_leaves_what_is_not_a_plain_bf16_linear() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    hooked = linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    own = Own(8, 8, dtype=torch.bfloat16)
    meta = nn.Linear(8, 8, dtype=torch.bfloat16, device="meta")
    module = nn.Sequential(hooked, own, meta, nn.Linear(8, 8))
    kept = list(module)
    assert use_small_linears(module) == 0
    assert all(now is before for now, before in zip(module, kept, strict=True))


@pytest.mark.parametrize(("sets", "count"), [((), 0), (("portable",), 0), (("avx2", "x"), 1)])
def test_swaps_only_where_the_kernel_is_faster(
    sets: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_INSTRUCTION_SETS", sets)
    assert use_small_linears(nn.Sequential(linear())) == count


def swapped(model: PagedModel) -> int:
    return sum(isinstance(m, SmallBatchLinear) for m in model.module.modules())


def test_loading_swaps_in_bfloat16_only(tmp_path: Path) -> None:
    config = tiny_config("LlamaForCausalLM")
    path = write_random_model(tmp_path / "llama", config, seed=3, scale=8.0)
    every = 22 if instruction_sets()[0] in FASTER_SETS else 0
    for dtype, count in ((torch.bfloat16, every), (torch.float32, 0)):
        assert swapped(load_paged_model(path, PortableKernels(), dtype)) == count
        random_model = random_paged_model(config, PortableKernels(), 3, dtype, scale=8.0)
        assert swapped(random_model) == count


@pytest.mark.usefixtures("faster")
def test_logits_err_no_more_than_transformers_do() -> None:
    """Against float32 with the same rounded weights, over ragged steps of 1 to 32 rows."""
    changes = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
    module = llama(**changes)
    ids = torch.randint(3, 509, (3, 40), generator=torch.Generator().manual_seed(1)).tolist()
    exact = torch.cat([oracle_logits(copy.deepcopy(module).float(), i) for i in ids])
    theirs = torch.cat([oracle_logits(module, i) for i in ids])
    model = random_paged_model(
        tiny_config("LlamaForCausalLM", **changes), PortableKernels(), 3, torch.bfloat16
    )
    assert swapped(model) == 22
    runner = runner_over(model)
    rows: list[list[torch.Tensor]] = [[], [], []]
    for begin, end in ((0, 9), (9, 10), (10, 20), (20, 21), (21, 31), (31, 40)):
        logits = runner.step([(str(i), ids[i][begin:end]) for i in range(3)])
        for i in range(3):
            rows[i].append(logits[i * (end - begin) : (i + 1) * (end - begin)])
    ours = torch.cat([part for parts in rows for part in parts])
    assert len(set(ours.argmax(-1).tolist())) > 10
    assert rms(ours - exact) <= 1.25 * rms(theirs - exact)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())
