"""Faults, injected by the hundred: ``python -m tests.faults`` prints what became of each kind.

Every fault is a function of a ``Workbench`` and a ``Tally``: it injects, looks at what the files
and exit codes say, and counts. Checkpoints and commands are black boxes to it.
"""
