"""What ``scripts/bench`` measures: a module for each section, and what they share.

A section is a function ``run(bench: Bench) -> Section`` in the module of its name (``-`` is ``_``).
"""
