"""The figures of ``kvell plan``: two shapes computed by hand, all shapes against the layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.byte_sizes import format_bytes
from kvell.cli.plan.report import device_fit
from kvell.engine.setup.sizes import GPU_KV_SHARE
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.pages.layout import GroupKind, LayerSpec, Layout
from kvell.pages.sizing import MANAGERS, plan_layout
from kvell.prefix.groups.capacity import longest_request, requests_that_fit
from kvell.vocabulary import GIB, KIB, MIB

Kvell = Callable[..., Any]
CONFIGS = Path(__file__).parents[3] / "bench" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
SOON = {"llama3-8b", "gemma3-27b", "jamba-mini", "deepseek-v2-lite", "llama-3.2-11b-vision"}
"""A family for each kind of layers; the long suite has all."""
COLUMNS = 100


@pytest.fixture
def found(kvell: Kvell) -> Callable[..., Any]:
    """The plan of a bench shape as JSON, and the cells of its printed tables."""

    def call(name: str | Path, *flags: str) -> Any:
        args = ("plan", "--model", CONFIGS / f"{name}.json", "--kv-memory", "24GiB", *flags)
        shown, data = kvell(*args), kvell(*args, "--json")
        assert (shown.code, data.code) == (0, 0), shown.stderr
        return json.loads(data.stdout), shown.stdout.splitlines()

    return call


def cells(lines: list[str], title: str) -> list[list[str]]:
    start = next(i for i, line in enumerate(lines) if line.startswith(title)) + 4
    rows: list[list[str]] = []
    for line in lines[start:]:
        if not line.strip():
            return rows
        rows.append([cell for cell in line.strip().split("  ") if cell])
    return rows


def stripped(rows: list[list[str]]) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in rows]


class TestLlamaByHand:
    """32 layers of K and V, 8 heads of 128 numbers of 2 bytes: 128 KiB a token, 2 MiB a page."""

    def test_data(self, found: Any) -> None:
        data, _ = found("llama3-8b")
        (group,) = data["groups"]
        assert group["token_bytes"] == 32 * 2 * 8 * 128 * 2 == 131_072
        assert (group["page_bytes"], group["padding_bytes"]) == (2 * MIB, 0)
        assert (data["large_page_bytes"], data["num_large_pages"]) == (2 * MIB, 12_288)
        assert data["sizing_rule"] == "lcm"
        assert fits(data) == {1024: 192, 4096: 48, 16384: 12, 65536: 3, 131072: 1}

    def test_what_a_person_reads(self, found: Any) -> None:
        _, lines = found("llama3-8b")
        assert "24 GiB of KV memory = 12,288 large pages of 2 MiB" in lines[0]
        assert lines[1] == "sizing rule lcm: the least common multiple of all pages"
        row = ["full", "32", "128 KiB", "16 tokens", "2 MiB", "0.00 %", "1"]
        assert stripped(cells(lines, "Layer groups")) == [row]
        assert stripped(cells(lines, "Requests, while"))[0] == ["1,024 tokens", "128 MiB", "192"]

    def test_a_gpu(self, found: Any) -> None:
        """8.03 billion weights; a step of 2,048 tokens that gives 256 rows of logits."""
        data, lines = found("llama3-8b")
        weights, step = 2 * 8_030_261_248, 32 * MIB
        step += 2048 * 4 * (12 * 4096 + 3 * 14336) + 256 * 2 * 4 * 128256
        assert (data["weights_bytes"], data["step_bytes"]) == (weights, step)
        small = data["devices"][0]
        pages = int(0.9 * (24 * 10**9 - weights - step)) // (2 * MIB)
        assert pages == 2_956
        assert small["kv_memory_bytes"] == pages * 2 * MIB
        assert small["longest_request_tokens"] == pages * 16
        assert [fit["requests"] for fit in small["requests"]] == [46, 11, 2, 0, 0]
        row = ["24 GB", "5.77 GiB", "47,296", "46", "11", "2", "0", "0"]
        assert stripped(cells(lines, "Requests that fit together"))[0] == row
        assert (
            "on a GPU, in addition to KV memory: 15.0 GiB of weights, 1,002 MiB for a step" in lines
        )


def test_what_instances_reach_together(kvell: Kvell, tmp_path: Path, smollm2_path: Path) -> None:
    """68 pages of 16 tokens hold two sections of 512, of which each lends two."""
    (tmp_path / "cache").symlink_to(smollm2_path.parent)  # else the model is converted anew

    def planned(size: str, *flags: str) -> Any:
        shown = kvell("plan", "--dtype", "float32", "--kv-memory", size, *flags)
        assert shown.code == 0, shown.stderr
        return shown.stdout

    data = json.loads(planned("48MiB", "--json"))
    assert data["longest_request_tokens"] == 1088
    assert data["reach_tokens"] == {"2": 2048, "4": 4096, "8": 8192}
    line = "on instances that lend each other memory: 2,048 on 2, 4,096 on 4, 8,192 on 8"
    assert line in planned("48MiB").splitlines()
    assert json.loads(planned("1GiB", "--json"))["reach_tokens"] == {}
    both = planned("48MiB", "smollm2", "other=smollm2").splitlines()
    assert {f"smollm2: {line}", f"other: {line}"} <= set(both)


class TestJambaByHand:
    """28 states of (8192, 3) and (8192, 16) numbers; 4 layers of 8 heads of 128."""

    STATE = 2 * (8192 * 3 + 8192 * 16)

    def test_data(self, found: Any) -> None:
        data, _ = found("jamba-mini")
        state, full = data["groups"]
        assert state["token_bytes"] == 28 * self.STATE == 8_716_288
        assert (state["kind"], state["page_tokens"], state["layers_per_page"]) == ("state", 1, 1)
        assert (state["pages_per_state"], full["pages_per_state"]) == (28, 0)
        assert data["longest_request_tokens"] == data["max_model_len"] == 262_144
        assert (state["page_bytes"], state["padding_bytes"]) == (self.STATE, 704)
        assert full["token_bytes"] == 4 * 2 * 8 * 128 * 2 == 16 * KIB
        assert (full["page_bytes"], full["padding_bytes"]) == (256 * KIB, 1856)
        assert data["large_page_bytes"] == 11 * (self.STATE + 704) == 13 * (256 * KIB + 1856)
        assert data["num_large_pages"] == 24 * GIB // 3_432_000 == 7_508
        assert data["sizing_rule"] == "padded"

    def test_requests(self, found: Any) -> None:
        """1,024 tokens: 64 pages and a state of 28. 1,005 requests: 4,948 + 2,559 large pages."""
        data, _ = found("jamba-mini")
        assert -(-1005 * 64 // 13) + -(-1005 * 28 // 11) == 7_507
        assert -(-1006 * 64 // 13) + -(-1006 * 28 // 11) == 7_514
        assert fits(data)[1024] == 1_005
        first = data["requests_that_fit"][0]
        assert first["request_bytes"] == 64 * (256 * KIB + 1856) + 28 * (self.STATE + 704)

    def test_what_a_person_reads(self, found: Any) -> None:
        _, lines = found("jamba-mini")
        assert "7,508 large pages of 3.27 MiB" in lines[0]
        assert lines[1].startswith("sizing rule padded: ")
        assert stripped(cells(lines, "Layer groups")) == [
            ["state", "28", "8.31 MiB", "state of 1", "305 KiB", "0.23 %", "11"],
            ["full", "4", "16 KiB", "16 tokens", "258 KiB", "0.70 %", "13"],
        ]

    def test_gpus_of_given_sizes(self, found: Any) -> None:
        """In the order given, in place of the common ones."""
        data, lines = found("jamba-mini", "--gpu-memory", "192GiB", "--gpu-memory", "80GB")
        assert [d["memory_bytes"] for d in data["devices"]] == [192 * GIB, 80 * 10**9]
        rows = stripped(cells(lines, "Requests that fit together"))
        assert [row[0] for row in rows] == ["192 GiB", "80 GB"]
        assert rows[1][1] == "none left"
        assert lines[-1].startswith("a model must fit one GPU: there is no tensor parallelism")

    def test_weights_that_do_not_fit(self, found: Any) -> None:
        """51.6 billion weights are 96.1 GiB, the step needs 880 MiB: only 141 GB hold them."""
        data, lines = found("jamba-mini")
        assert [d["kv_memory_bytes"] > 0 for d in data["devices"]] == [False, False, True]
        rows = stripped(cells(lines, "Requests that fit together"))
        assert rows[1] == ["80 GB", "none left", *"------"]
        assert rows[2][:3] == ["141 GB", "31.0 GiB", "262,144"]


def fits(data: Any) -> dict[int, int]:
    return {fit["request_tokens"]: fit["requests"] for fit in data["requests_that_fit"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOON else pytest.mark.long) for name in NAMES]
)
def test_every_shape_shows_its_layout(found: Any, name: str) -> None:
    """Figures of the printed table and of the data are those of ``plan_layout``."""
    data, lines = found(name)
    layout = plan_layout(describe(read_config(CONFIGS / f"{name}.json"), 2).layers, 24 * GIB)
    rows = stripped(cells(lines, "Layer groups"))
    assert data["sizing_rule"] == layout.sizing_rule
    assert lines[1].startswith(f"sizing rule {layout.sizing_rule}: ")
    for group, row, entry in zip(layout.groups, rows, data["groups"], strict=True):
        padding = group.padding_bytes / group.page_stride_bytes
        assert row[:3] == [group.name, str(len(group.layers)), format_bytes(group.token_bytes)]
        assert row[4:] == [
            format_bytes(group.page_stride_bytes),
            f"{padding:.2%}".replace("%", " %"),
            f"{group.pages_per_large:,}",
        ]
        assert entry["token_bytes"] == group.token_bytes
        assert entry["page_bytes"] == group.page_stride_bytes - group.padding_bytes
        assert entry["page_bytes"] >= group.token_bytes or group.kind is GroupKind.STATE
    assert fits(data) == {n: requests_that_fit(layout, n) for n in fits(data)}
    assert max(map(len, tables(lines))) <= COLUMNS


def tables(lines: list[str]) -> list[str]:
    return lines[lines.index(next(line for line in lines if line.startswith("Layer groups"))) :]


@pytest.mark.parametrize("name", ["gemma3-27b", "llava-onevision-7b"])
def test_gpus_hold_what_an_engine_there_would(found: Any, name: str) -> None:
    data, lines = found(name)
    description = describe(read_config(CONFIGS / f"{name}.json"), 2)
    rows = stripped(cells(lines, "Requests that fit together"))
    assert [row[0] for row in rows] == ["24 GB", "80 GB", "141 GB"]
    for device in data["devices"]:
        left = device["memory_bytes"] - data["weights_bytes"] - data["step_bytes"]
        if left > 0:
            layout = plan_layout(description.layers, int(left * GPU_KV_SHARE))
            assert device["kv_memory_bytes"] == layout.pool_bytes
            assert device["longest_request_tokens"] == longest_request(
                layout, description.max_model_len, 16
            )
            for fit in device["requests"]:
                assert fit["requests"] == requests_that_fit(layout, fit["request_tokens"])
        else:
            assert device["kv_memory_bytes"] == 0


@pytest.mark.parametrize("manager", MANAGERS)
def test_every_manager_names_its_rule(kvell: Kvell, manager: str) -> None:
    path = CONFIGS / "gemma3n-e4b.json"
    ended = kvell("plan", "--model", path, "--kv-memory", "4GiB", "--manager", manager)
    assert ended.code == 0, ended.stderr
    assert "\nsizing rule " in ended.stdout


def test_what_cannot_be_served_yet_is_said(found: Any, tmp_path: Path) -> None:
    served, lines = found("qwen3-8b")
    assert served["refusal"] == ""
    assert not any("refuse it" in line for line in lines)
    (tmp_path / "llava.json").write_text(json.dumps({"model_type": "llava"}))
    refused, lines = found(tmp_path / "llava")
    assert refused["refusal"].startswith("LlavaForConditionalGeneration needs an encoder")
    assert f"generate and serve refuse it: {refused['refusal']}" in lines


@pytest.mark.parametrize(
    ("name", "quantised", "dtype", "line"),
    [
        (
            "qwen3-8b",
            {"quant_method": "awq"},
            "auto",
            "awq, 4 bits in groups of 128; read into int4",
        ),
        (
            "qwen3-8b",
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "auto",
            "fp8, 8 bits in blocks of 128 x 128; read into int8; activations are not quantised",
        ),
        (
            "gpt-oss-20b",
            {"quant_method": "mxfp4"},
            "float32",
            "mxfp4, 4 bits in groups of 32; read into float32",
        ),
    ],
)
def test_a_quantised_checkpoint_says_what_it_is_read_into(
    found: Any, tmp_path: Path, name: str, quantised: dict[str, Any], dtype: str, line: str
) -> None:
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantised}))
    data, lines = found(tmp_path / "config", "--dtype", dtype)
    assert data["stored_as"] == line
    assert f"weights are stored as {line}" in lines
    assert data["refusal"] == ""
    plain, _ = found(name)
    assert plain["stored_as"] == ""


def test_a_quantisation_that_is_not_read_is_said(found: Any, tmp_path: Path) -> None:
    raw = json.loads((CONFIGS / "qwen3-8b.json").read_text())
    quantised = {"quant_method": "gptq", "bits": 3, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantised}))
    data, _ = found(tmp_path / "config")
    assert "3 bits are not read" in data["refusal"]
    assert data["stored_as"] == ""


@pytest.mark.parametrize(
    ("name", "more"),
    [("llama-3.2-11b-vision", "32 KiB more (cross)"), ("paligemma2-10b", "7 KiB more (vision)")],
)
def test_what_an_image_takes_is_said(found: Any, name: str, more: str) -> None:
    _, lines = found(name)
    assert any(line.endswith(f"a token of an image takes {more}") for line in lines)


def test_no_weights_are_known_of_a_class_that_is_not_there(
    kvell: Kvell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvell.models.families.refusals.class_run", lambda config: "NoSuchClass")
    unusual = ("--hf-overrides", '{"add_bias_linear": true}')  # transformers makes the model
    args = ("plan", "--model", CONFIGS / "zamba2-7b.json", *unusual, "--kv-memory", "4GiB")
    data = json.loads(kvell(*args, "--json").stdout)
    assert (data["weights_bytes"], data["devices"]) == (None, [])
    assert "GPU" not in kvell(*args).stdout


class TestAGpu:
    LAYERS = (LayerSpec(0, GroupKind.FULL, 1, 64, 2),)
    """256 bytes a token, 4 KiB a page."""

    def layout_of(self, pool_bytes: int) -> Layout:
        return plan_layout(self.LAYERS, pool_bytes)

    def test_what_is_taken_is_taken_first(self) -> None:
        fit = device_fit(10 * MIB, 6 * MIB, 0.5, self.layout_of, (1024, 4096, 16384))
        assert fit.kv_memory_bytes == 2 * MIB
        assert fit.longest_request_tokens == 2 * MIB // 256
        assert fit.requests == (8, 2, 0)

    @pytest.mark.parametrize("taken_bytes", [10 * MIB, 11 * MIB, 10 * MIB - 4 * KIB])
    def test_nothing_left_or_less_than_a_page(self, taken_bytes: int) -> None:
        fit = device_fit(10 * MIB, taken_bytes, 0.5, self.layout_of, (1024,))
        assert (fit.kv_memory_bytes, fit.longest_request_tokens, fit.requests) == (0, 0, (0,))


def test_a_gpu_is_not_planned_for_several_models(kvell: Kvell) -> None:
    ended = kvell("plan", "a=smollm2", "b=smollm2", "--gpu-memory", "80GB")
    assert ended.code == 2
    assert "--gpu-memory" in ended.stderr
    assert "plan each model by itself" in ended.stderr
