"""Compiled operators for the lean path on a CPU: optional, built on first use by the C compiler that is at hand."""
