"""Moves rows between the ranks of a process group, over the transport that the group has."""

from mxep.comm.collective import exchange_counts, gather_all_rows, group_name_of, resolve_group
from mxep.comm.host_allgather import ExchangeError
from mxep.comm.transport import (
    TRANSPORTS,
    Transport,
    close_transports,
    exchange_dequantized,
    exchange_quantized,
    exchange_rows,
    register,
    set_transport,
    transport_of,
)

__all__ = [
    "TRANSPORTS",
    "ExchangeError",
    "Transport",
    "close_transports",
    "exchange_counts",
    "exchange_dequantized",
    "exchange_quantized",
    "exchange_rows",
    "gather_all_rows",
    "group_name_of",
    "register",
    "resolve_group",
    "set_transport",
    "transport_of",
]
