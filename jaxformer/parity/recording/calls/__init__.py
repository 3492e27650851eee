"""Records the calls of modules.

In goes a PyTorch or an NNX module with its inputs. Out comes, by module path, every call with its
arguments and outputs; or the results and gradients of one module of either side run isolated.

- ``torch_trace``: one pass of the reference; ``torch_recorder``: the hooks that record it.
- ``jax_trace``: one pass of the candidate, and copies of it in other dtypes.
- ``whole_models``: how a model of jaxformer is called.
- ``torch_isolated``: one PyTorch module run by itself, its submodules returning given outputs.
- ``jax_isolated``: the same of a JAX module; ``jax_programs``: its jaxprs, shared by equal modules.
- ``attention``: recorded attention weights and scores.
- ``padding``: tokens that no attention looks at.
"""
