"""Estimates what a training run takes before it is made: memory, operations, traffic, time.

A ``TrainConfig`` and perhaps the name of a topology go in, a ``ResourceEstimate`` comes out. The
programs are compiled from shapes, for the devices here or for a TPU slice or GPUs that need not be
here; where nothing can compile for them, a model of a step replaces the compiler.

- ``plan``: the entry point.  ``table``: an estimate as a table in the terminal.
- ``topologies``, ``gpu_topologies``: the devices, and what XLA must know of GPUs.
- ``programs``: compiles a run's programs.  ``collectives``: reads what they send from their text.
- ``step_model``: a step by arithmetic alone;  ``block_kinds``, ``block_widths``: the blocks in it.
- ``roofline``: the shortest time of a step.
- ``resources``: the estimate, from compiled programs or from the model of a step.
- ``remedies``: settings with which a run that does not fit would.
"""
