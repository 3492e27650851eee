"""Runs one side of a comparison and records what passes through each of its modules.

In goes a PyTorch or an NNX module with its inputs. Out comes, by module path, every call with its
arguments and outputs; or the results and gradients of one module of either side run isolated.

- ``torch_trace``: one pass of the reference.
- ``torch_recorder``: the hooks that record calls of PyTorch modules.
- ``torch_values``: tensors as arrays; models and inputs in other precisions.
- ``jax_trace``: one pass of the candidate, and copies of it in other dtypes.
- ``wide_parameters``: weights that become float64 when they are read.
- ``isolated_run``: one JAX module run by itself, its submodules returning given outputs.
- ``torch_isolated``: the same of a PyTorch module.
- ``attention``: recorded attention weights and scores.
- ``padding``: tokens that no attention looks at.
- ``memory``: freed memory returned to the system.

Nothing here compares the two sides. torch is imported only inside functions.
"""
