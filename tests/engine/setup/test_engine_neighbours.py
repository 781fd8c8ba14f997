"""Addresses for neighbours' pools: one of several instances has them, where they are not scarce."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvell.device.host_chunks import HostChunks
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.setup import engine_memory
from kvell.errors import ChangeSomething
from kvell.mempool.rendezvous import FolderRendezvous, PageTransport, make_folder
from kvell.vocabulary import MIB
from tests.models.harness import paged, tiny_module
from tests.models.serving.engines import engine_of

FUSED = ("LlamaForCausalLM", True)


def place(folder: Path, transport: PageTransport = "memory") -> FolderRendezvous:
    make_folder(folder)
    return FolderRendezvous("mixed-0", folder, transport=transport)


def test_instances_of_several_hosts_borrow_where_kernels_are_those_of_the_service(
    tmp_path: Path,
) -> None:
    """By the compiled pass or by modules; those of one host read in place, whatever computes."""
    modules = FUSED[0], False

    def portable(transport: PageTransport, folder: Path) -> Engine:
        options = EngineOptions(
            kv_memory_bytes=8 * MIB, max_model_len=256, pool_place=place(folder, transport)
        )
        return build_engine(paged(tiny_module(FUSED[0])), FUSED[0], options)

    def one_group(transport: PageTransport, folder: Path) -> Engine:
        """Layers with windows share the group of those with full attention."""
        at = place(folder, transport)
        return engine_of("Gemma3ForCausalLM", True, manager="paged", pool_place=at)

    def native(model: tuple[str, bool]) -> Callable[[PageTransport, Path], Engine]:
        return lambda transport, folder: engine_of(*model, pool_place=place(folder, transport))

    cases: list[tuple[str, PageTransport, Callable[[PageTransport, Path], Engine], bool]] = [
        ("a", "memory", native(FUSED), True),
        ("b", "tcp", native(FUSED), True),
        ("c", "memory", native(modules), True),
        ("d", "tcp", native(modules), True),
        ("e", "memory", portable, True),
        ("f", "tcp", portable, False),
        ("g", "tcp", native(("Gemma3ForCausalLM", True)), True),
        ("h", "tcp", one_group, False),
    ]
    for name, transport, make, borrows in cases:
        (tmp_path / name).mkdir()
        engine = make(transport, tmp_path / name)
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
