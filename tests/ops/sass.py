"""The machine code of compiled kernels, if Triton's disassembler is installed."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/")
_PROGRAM, _RUNS = 1, 4  # an ELF section's type and its flag of machine code


def disassembler() -> str | None:
    """Path of nvdisasm, None without Triton's."""
    try:
        from triton import knobs
    except ImportError:
        return None
    path = knobs.nvidia.nvdisasm.path
    return path if Path(path).exists() else None


def instructions(cubins: Sequence[bytes], chip: str) -> list[list[str]]:
    """Instructions of each cubin of a chip ("SM90a"), without addresses and encodings; needs a `disassembler`.

    One call disassembles the machine code of all, end to end: a call takes a third of a second however short the code is.
    """
    path = disassembler()
    assert path is not None
    codes = [_machine_code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(b"".join(codes))
        file.flush()
        text = subprocess.run([path, "-b", chip, file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(found[1], 16), line) for line in text.splitlines() if (found := _ADDRESS.match(line))]
    start, parts = 0, []
    for code in codes:
        parts.append([re.sub(r"/\*.*?\*/", "", line).strip() for at, line in lines if start <= at < start + len(code)])
        assert parts[-1], "no instruction"
        start += len(code)
    return parts


def _machine_code(cubin: bytes) -> bytes:
    """Bytes of all sections of a cubin (ELF, 64 bits, little-endian) that run."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number = struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(number)]
    return b"".join(cubin[at : at + length] for _, kind, flags, _, at, length in sections if kind == _PROGRAM and flags & _RUNS)


def stack_pointer_as_data(code: list[str]) -> list[str]:
    """Instructions that read R1, the stack pointer, other than to address the stack: ptxas 12.8 takes bytes of e4m3 pairs from there.

    R1 can also be filler whose bytes the next instruction drops: follow it in the SASS before believing either.
    """
    addresses = re.compile(r"(?:@!?U?P\d+ )?(?:LDC|IADD3|VIADD|STL|LDL)\b")
    return [line for line in code if re.search(r"\bR1\b", line) and not addresses.match(line)]
