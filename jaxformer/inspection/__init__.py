"""Looks inside a trained model or a checkpoint: numbers, pictures, a tree.

A checkpoint goes in. ``checkpoint_tree`` lists it without building its model. An inspection builds
the model, computes numbers by the mirror's own functions (``analysis``, ``scaling``, ``costs``) and
draws them; matplotlib is imported only for pictures.

- ``inspected_model``: the model that is looked into, and the text that it reads.
- ``inspections``: the numbers of each inspection;  ``attention_maps``: of attention, and what a
  notebook shows of it;  ``expert_load``: of experts.
- ``narrowing_cost``: what int8 or bfloat16 weights cost on a text.
- ``pictures``: the picture of each inspection;  ``charts``, ``maps``: how they are drawn.
- ``checkpoint_tree``: arrays, sizes, settings and origin of a checkpoint.
- ``runs``: training runs side by side;  ``runs_table``: as tables in the terminal.
"""
