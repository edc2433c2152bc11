"""What a compiled kernel's machine code says, where Triton's disassembler is there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path


def disassembler() -> str | None:
    """Path of nvdisasm, None without Triton's."""
    try:
        from triton import knobs
    except ImportError:
        return None
    path = knobs.nvidia.nvdisasm.path
    return path if Path(path).exists() else None


def instructions(cubin: bytes) -> list[str]:
    """Lines of the disassembly without addresses and encodings; needs a `disassembler`."""
    path = disassembler()
    assert path is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([path, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return [re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines()]


def stack_pointer_as_data(cubin: bytes) -> list[str]:
    """Instructions that read R1, the stack pointer, other than to address the stack: ptxas 12.8 takes bytes of e4m3 pairs from there.

    R1 can also be filler whose bytes the next instruction drops: follow it in the SASS before believing either.
    """
    addresses = re.compile(r"(?:@!?U?P\d+ )?(?:LDC|IADD3|VIADD|STL|LDL)\b")
    return [line for line in instructions(cubin) if re.search(r"\bR1\b", line) and not addresses.match(line)]
