"""What the machine and its devices offer: memory, speed, caches, pages.

Nothing here knows of models or training. Device kinds go in; numbers and folders
come out.

- ``accelerators``: peaks, memory and links of known GPUs and TPUs; utilization of a run.
- ``invocation``: commands as this user has to write them.
- ``array_memory``: memory for a model's parameters, in pages of 2 MiB.
- ``memory``: how much memory devices and this machine have, and how much is in use.
- ``compilation_cache``: compiled programs kept between runs.
- ``custom_call_builds``: builds this package's code in C, once for a machine, before JAX if wanted.
- ``custom_calls``: loads what was built, and makes it known to XLA.
- ``matrix_products``: makes matrix products known to XLA, jaxformer's own or torch's.
- ``torch_library``: finds the matrix products of the library that torch brings along.
- ``row_products``: makes products of few rows with large matrices known to XLA.
- ``attention_call``: the same for attention and its gradients.
- ``norm_calls``: the same for norms of rows and their gradients.
- ``activation_calls``: the same for GELU and its slope.
- ``loss_calls``: the same for the cross-entropy of many classes and its gradient.
- ``update_calls``: the same for updates of parameters by AdamW, and for sums of squares.
- ``processor``: a name for the kind of processor.
- ``huge_pages``: restarts a program so that the C library uses pages of 2 MiB.
- ``nvidia_driver``: whether an NVIDIA GPU can be used, found before JAX looks.
- ``user_folders``: the user's cache folder.
- ``screen``: the terminal that a command prints to, whose reader may leave early.
- ``units``: counts, sizes, times and rates as text.
"""
