"""Adapters for other trainers, one file per trainer and version; importing mxep imports none of them."""
