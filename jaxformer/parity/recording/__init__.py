"""Stage 1: runs a side and records what passes through it.

In go a PyTorch module, or a candidate of JAX, and inputs. Out come the calls of its modules, where
modules of both sides are known by name, or its operators, where nothing is.

- ``calls/``: what every module of a side was called with and returned; a module run by itself.
- ``operators/``: every operator of a side, with its values and its line of code, on a *tape*.
- ``module_calls``: calls of the modules of a JAX model, routed through a function.
- ``result_parts``: the arrays of a result, and their paths.
- ``torch_values``: tensors as arrays; models and inputs in other precisions.
- ``twins``: embeddings that a PyTorch model has several times, as one.
- ``wide_parameters``: weights that become float64 when they are read.
- ``memory``: freed memory returned to the system.

The candidate is always recorded in one way: it is traced to a jaxpr, whose operators are evaluated
one after another; no program is compiled of the whole. Whole models and single modules are
evaluated as they are written, models of operators with every float in float64.

Nothing here compares the two sides. torch is imported only inside functions.
"""
