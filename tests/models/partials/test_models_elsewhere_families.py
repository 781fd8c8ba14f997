"""Every family with full attention, by transformers' modules, asks others for its sections."""

import pytest
import torch

from kvell.memory import GroupKind
from kvell.models.config.description import describe
from kvell.models.partials.remote_sections import RemoteSections
from kvell.vocabulary import SECTION_TOKENS
from tests.models.cases import families
from tests.models.harness import FAMILIES, tiny_config, tiny_module
from tests.models.lent_pass import (
    NAMES,
    Lender,
    Work,
    filled_prefix,
    lent_logits,
    lent_runs,
    local_logits,
)

pytest.importorskip("kvell.models.partials._partials")
from tests.models.fused_models import generic_model

CONTEXT = 2 * SECTION_TOKENS + 6
"""Where states are after it, and nowhere before."""
WITH_FULL = [
    name
    for name in FAMILIES
    if any(x.kind is GroupKind.FULL for x in describe(tiny_config(name), 4).layers)
]
DRAWN = [Work(CONTEXT, 3, ("x", "y")), Work(CONTEXT, 1, ("y",)), Work(CONTEXT, 2)]


@pytest.mark.parametrize("architecture", families(WITH_FULL))
def test_what_others_compute_changes_no_bit_of_any_family(architecture: str) -> None:
    """Scales, soft caps, sinks, latents and shared keys are those of the family's own calls."""
    prefix = filled_prefix(generic_model(tiny_module(architecture)), NAMES, CONTEXT)
    local = local_logits(prefix, DRAWN)
    assert not local.isnan().any()
    lenders = {name: Lender(prefix, seed) for seed, name in enumerate("xy")}
    elsewhere = RemoteSections({name: one.creditor for name, one in lenders.items()})
    lent = lent_logits(prefix, DRAWN, elsewhere, lent_runs(lenders, DRAWN))
    assert elsewhere.lacking == []
    assert torch.equal(lent, local)
    full = [x for x in prefix.model.description.layers if x.kind is GroupKind.FULL]
    assert [one.line.posted for one in lenders.values()] == [len(full)] * 2
    assert [one.service.wrong() for one in lenders.values()] == [0, 0]
