"""Attention and Mamba heads in one layer: against an oracle of its own, and what a config says.

The situations that every family meets in a whole engine: ``test_models_served``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, plan_layout
from kvell.models.config.configs import config_from_dict
from kvell.models.config.description import describe
from kvell.models.families.families import check_architecture
from kvell.models.families.weight_sizes import weights_bytes
from kvell.models.loading.loading import check_model
from kvell.models.loading.random_weights import write_random_model
from kvell.models.loading.weight_files import read_weight_map
from kvell.models.loading.weights import load_module
from kvell.vocabulary import GIB
from tests.models import parallel_heads_oracle
from tests.models.harness import (
    assert_exact,
    oracle_logits,
    paged,
    prompt_ids,
    runner_over,
    tiny_config,
    tiny_module,
)

NAME = "ParallelHeadsForCausalLM"
FIELDS: dict[str, Any] = {
    "model_type": "parallel_heads",
    "architectures": [NAME],
    "hidden_size": 1600,
    "intermediate_size": 5504,
    "num_hidden_layers": 32,
    "num_attention_heads": 25,
    "num_key_value_heads": 5,
    "vocab_size": 32_001,
    "max_position_embeddings": 8192,
    "sliding_window": 1024,
    "global_attn_idx": [0, 15, 31],
    "kv_reuse_group": [
        *([first, first + 1] for first in range(1, 15, 2)),
        [16, 17, 18],
        *([first, first + 1] for first in range(19, 31, 2)),
    ],
    "mamba_d_state": 16,
    "mamba_dt_rank": 100,
}
"""The shape of Hymba-1.5B, without its meta tokens."""


def expected(ids: list[int]) -> torch.Tensor:
    module = tiny_module(NAME)
    return parallel_heads_oracle.logits(module.state_dict(), module.config, ids).float()


def test_the_module_computes_what_the_papers_say() -> None:
    ids = prompt_ids(37)
    assert_exact(oracle_logits(tiny_module(NAME), ids), expected(ids))
    assert len(set(expected(ids).argmax(-1).tolist())) > 18, "outputs vary"


@pytest.mark.parametrize("chunk", [37, 10, 1])
def test_pages_give_the_same_in_any_chunks(chunk: int) -> None:
    ids, runner = prompt_ids(37), runner_over(paged(tiny_module(NAME)))
    parts = [runner.step([("a", ids[i : i + chunk])]) for i in range(0, 37, chunk)]
    assert_exact(torch.cat(parts), expected(ids))


@pytest.mark.parametrize("part", ["attention_norm.weight", "mamba_norm.weight"])
def test_both_halves_of_a_layer_reach_the_logits(part: str) -> None:
    """With one scaled away, the answer is another: this test sees that the others could fail."""
    ids, module = prompt_ids(20), tiny_module(NAME)
    weights = dict(module.state_dict())
    weights[f"model.layers.2.{part}"] = torch.zeros_like(weights[f"model.layers.2.{part}"])
    changed = parallel_heads_oracle.logits(weights, module.config, ids)
    assert (changed - expected(ids)).abs().max() > 0.01 * expected(ids).abs().max()


def test_an_early_token_reaches_far_beyond_the_window() -> None:
    ids = prompt_ids(40)
    other = [ids[0] ^ 1, *ids[1:]]
    difference = (expected(ids)[-1] - expected(other)[-1]).abs().max()
    assert difference > 1e-3 * expected(ids).abs().max()


def test_groups_follow_from_the_config_alone() -> None:
    config = config_from_dict(FIELDS)
    check_architecture(config)
    description = describe(config, 2)
    by_kind = {
        kind: [x.index for x in description.layers if x.kind is kind and x.kv_of is None]
        for kind in GroupKind
    }
    assert by_kind[GroupKind.FULL] == [0, 15, 31]
    assert by_kind[GroupKind.SLIDING] == [1, 3, 5, 7, 9, 11, 13, 16, 19, 21, 23, 25, 27, 29]
    assert by_kind[GroupKind.STATE] == list(range(32))
    sharing = {x.index: x.kv_of for x in description.layers if x.kv_of is not None}
    assert (sharing[2], sharing[17], sharing[18], len(sharing)) == (1, 16, 16, 15)
    groups = plan_layout(description.layers, GIB).groups
    token_bytes = {group.kind: group.token_bytes for group in groups}
    assert token_bytes[GroupKind.FULL] == 3 * 2 * 5 * 64 * 2
    assert token_bytes[GroupKind.SLIDING] == 14 * 2 * 5 * 64 * 2
    assert token_bytes[GroupKind.STATE] == 32 * 3200 * (3 + 16) * 2
    weights = weights_bytes(config, 2)
    assert weights is not None
    assert 2.5e9 < weights < 3.5e9


def test_layers_of_unlike_windows_do_not_share() -> None:
    with pytest.raises(ChangeSomething, match="have different windows"):
        config_from_dict(FIELDS | {"kv_reuse_group": [[0, 1]]})


@pytest.mark.parametrize("group", [[31, 32], [40, 41], [-1, 1]])
def test_a_layer_that_does_not_exist_shares_nothing(group: list[int]) -> None:
    expected_text = r"kv_reuse_group names layer -?\d+, which does not exist: use layers 0 to 31"
    with pytest.raises(ChangeSomething, match=expected_text) as refused:
        config_from_dict(FIELDS | {"kv_reuse_group": [[1, 2], group]})
    assert refused.value.remedy == "repair its config.json"


def test_a_directory_of_it_loads(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "tiny", tiny_config(NAME), 3, scale=8.0)
    check_model(path)
    config = tiny_config(NAME)
    module = load_module(read_weight_map(path), config, torch.float32, torch.device("cpu"))
    ids = prompt_ids(12)
    written = parallel_heads_oracle.logits(module.state_dict(), config, ids).float()
    assert_exact(oracle_logits(module, ids), written)
