"""From one naming to another: what a dialect may declare, and the plans of imports and exports.

A plan is made from the names and shapes of stored tensors, a dialect and a config, before any
weight is read. It has the abstract target module, the links between arrays, and tensors that are
converted when they are read.

- ``naming``: the rule between jaxformer and torch_ref, which all others build on.
- ``rules``, ``settings``: tables of arrays and of settings, read in both directions;
  ``packings``: arrays that are fused or reordered; ``unread_settings``: those that nobody reads.
- ``adapter``: the declaration of a code base; ``source_model``: what its builders read.
- ``abstract_modules``, ``validation``: target modules without weights, from untrusted settings.
- ``matching``: finds the class that arrays belong to; ``plans``: plans of imports and exports.
- ``wrapped_names``: what wrappers of modules add to names.
- ``transfer``, ``casts``: tensors that are converted when they are read.
- ``optimizer_state``: what optimizers keep, carried by the same links; ``optimizer_groups``: their
  settings; ``optimizer_names``: which parameter each entry is; ``run_optimizers``: that of a run.
- ``position_tables``: imported tables of positions.
"""
