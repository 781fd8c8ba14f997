"""The audit of the CPU buffer's books."""

from kvell.elastic.logical_buffer import CpuBuffer


def audit_buffer(buffer: CpuBuffer) -> list[str]:
    problems = []
    if buffer.held_chunks > buffer.physical_chunks:
        problems.append(f"{buffer.held_chunks} chunks held of {buffer.physical_chunks}")
    if buffer.physical_chunks and not 1 <= buffer.logical_chunks <= buffer.physical_chunks:
        problems.append(f"a logical size of {buffer.logical_chunks} chunks")
    problems.extend(f"holder {h} holds {n} chunks" for h, n in buffer.held.items() if n <= 0)
    return problems
