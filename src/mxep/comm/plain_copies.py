"""What a wire takes at best: plain copies into the other ranks' memory, by copy engines alone.  For measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mxep.comm.session import Copy
from mxep.comm.symmetric import SymmetricTransport

_COPIES = 100  # what a session is opened for, the first fact on the board


def plain_copies(transport: SymmetricTransport, pieces: Sequence[Tensor], region: int) -> Callable[[], None]:
    """Copies of pieces[rank], contiguous, to every other rank: into memory that is opened here, once, and with no flag behind them.

    Args:
        pieces: one for each rank, this one's own stays.  region: bytes of the largest piece of any rank, the same on all.

    Returns:
        what queues the copies, and lets the current stream wait for them; nobody may read what they wrote.
    """
    session = transport.open((_COPIES, region), (transport.world * region,), [])

    def copy() -> None:
        session.fork()
        for peer in session.order()[:-1]:
            piece = pieces[peer]
            session.put(peer, 0, [Copy(piece.data_ptr(), transport.rank * region, piece.numel() * piece.element_size())])
        transport.lanes.join()

    return copy
