"""Stage 1: runs a side and records what passes through it.

In go a PyTorch module, or a candidate of JAX, and inputs. Out come its operators, and what enters
and leaves its modules, where these are known.

- ``operators/``: every operator of a side, with its values and its line of code, on a *tape*.
- ``module_calls``: calls of the modules of a JAX model, routed through a function.
- ``jax_modules``: JAX modules by path, and copies; ``reference_modules``: PyTorch's by path.
- ``whole_models``: how whole models are called.
- ``jax_values``: leaves of JAX's trees as arrays.
- ``result_parts``: the arrays of a result, and their paths.
- ``torch_values``: tensors as arrays; models and inputs in other precisions.
- ``twins``: embeddings that a PyTorch model has several times, as one.
- ``memory``: freed memory returned to the system.

The candidate is always recorded in one way: it is traced to a jaxpr, whose operators are evaluated
one after another; no program is compiled of the whole.

Nothing here compares the two sides. torch is imported only inside functions.
"""
