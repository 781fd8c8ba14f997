"""Addresses for neighbours' pools: one of several instances has them, where they are not scarce."""

from pathlib import Path

import pytest

from kvell.device.host_chunks import HostChunks
from kvell.engine.setup import engine_memory
from kvell.errors import ChangeSomething
from kvell.mempool.rendezvous import FolderRendezvous, PageTransport, make_folder
from tests.models.serving.test_models_pooling_served import engine_of

FUSED = ("LlamaForCausalLM", True)


def place(folder: Path, transport: PageTransport = "memory") -> FolderRendezvous:
    make_folder(folder)
    return FolderRendezvous("mixed-0", folder, transport=transport)


def test_instances_of_several_hosts_borrow_where_a_compiled_pass_asks(tmp_path: Path) -> None:
    """Those of one host read in place, whatever computes."""
    modules = FUSED[0], False
    for name, transport, model, borrows in (
        ("a", "memory", FUSED, True),
        ("b", "tcp", FUSED, True),
        ("c", "memory", modules, True),
        ("d", "tcp", modules, False),
    ):
        (tmp_path / name).mkdir()
        engine = engine_of(*model, pool_place=place(tmp_path / name, transport))  # type: ignore[arg-type]
        full = [group for group in engine.core.memory.layout.groups if group.kind.value == "full"]
        section_bytes = 512 * sum(group.token_bytes for group in full)
        assert engine.ready().facts.section_bytes == (section_bytes if borrows else 0)
        engine.close()
    alone = engine_of(*FUSED)
    assert alone.ready().facts.section_bytes == 0 and not any(alone.core.stats().sections.values())


def test_where_addresses_are_scarce_an_instance_serves_and_borrows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def scarce(num_chunks: int, flag: str = "--memory", beyond_bytes: int = 0) -> HostChunks:
        tried.append(beyond_bytes)
        if beyond_bytes:
            raise ChangeSomething(flag, "8TiB", "cannot be mapped", "use a smaller size")
        return HostChunks(num_chunks, flag)

    scarce.chunk_bytes = HostChunks.chunk_bytes  # type: ignore[attr-defined]
    monkeypatch.setattr(engine_memory, "HostChunks", scarce)
    engine = engine_of(*FUSED, pool_place=place(tmp_path))
    assert len(tried) == 2 and tried[0] > tried[1] == 0
    assert engine.ready().facts.section_bytes == 0
    assert not any(engine.core.stats().sections.values())
    engine.close()
