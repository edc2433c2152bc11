"""The legend: every dimension letter that names, comments and docstrings of this package use.

Two vocabularies: MoE files speak of tokens and experts, GEMM files of rows and columns.  K is always the contraction of a
forward GEMM, never the number of choices.
"""

from __future__ import annotations

MX_BLOCK = 32  # values that share one scale
E4M3_MAX = 448.0  # largest finite float8_e4m3fn
RECORD_ALIGNMENT = 16  # bytes; a packed row starts where a 16-byte load may

LEGEND: dict[str, str] = {
    "T": "tokens on this rank",
    "T_global": "tokens on all ranks of the EP group",
    "C": "choices per token (top-k)",
    "T'": "rows sent by this rank, T * C",
    "W": "ranks of the EP group (EP degree)",
    "E": "experts in the layer",
    "L": "experts on this rank, E / W",
    "D": "model width",
    "H": "hidden width of one expert",
    "R": "rows received by this rank",
    "P": "rows after padding every expert to a multiple of the alignment",
    "M": "GEMM: rows of A and of the output (= P)",
    "K": "GEMM: contraction of forward",
    "N": "GEMM: columns of the output",
    "G": "GEMM: groups (= L)",
}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own costs the host microseconds.

    >>> cdiv(8, 4), cdiv(9, 4)
    (2, 3)
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two of at least n.

    >>> next_power_of_2(1), next_power_of_2(4), next_power_of_2(5)
    (1, 4, 8)
    """
    return 1 << (max(n, 1) - 1).bit_length()


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`.

    >>> round_up(33, 32)
    64
    """
    return (value + multiple - 1) // multiple * multiple


def record_bytes(width: int) -> int:
    """Bytes of one packed row: `width` e4m3 bytes, `width`/32 e8m0 bytes, padded to 16 bytes.

    >>> record_bytes(7168)
    7392
    """
    return round_up(width + width // MX_BLOCK, RECORD_ALIGNMENT)
