"""Moves rows between the ranks of a process group."""

from mxep.comm.collective import exchange_counts, exchange_rows, gather_all_rows, group_name_of, resolve_group

__all__ = ["exchange_counts", "exchange_rows", "gather_all_rows", "group_name_of", "resolve_group"]
