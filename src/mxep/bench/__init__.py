"""Measurements: one file per benchmark, their records, and the report that puts them into the README."""
