"""What the machine and its devices offer: memory, speed, caches, pages.

Nothing here knows of models or training. Device kinds go in; numbers and folders
come out.

- ``accelerators``: peaks, memory and links of known GPUs and TPUs; utilization of a run.
- ``invocation``: commands as this user has to write them.
- ``array_memory``: memory for a model's parameters, in pages of 2 MiB.
- ``memory``: how much memory devices and this machine have, and how much is in use.
- ``compilation_cache``: compiled programs kept between runs.
- ``custom_calls``: builds what XLA calls of this package's code in C, once for a machine.
- ``torch_library``: makes the matrix products of torch's library known to XLA.
- ``row_products``: the same for products of few rows with large matrices, of our own.
- ``attention_call``: the same for attention where there are no gradients.
- ``processor``: a name for the kind of processor.
- ``huge_pages``: restarts a program so that the C library uses pages of 2 MiB.
- ``nvidia_driver``: whether an NVIDIA GPU can be used, found before JAX looks.
- ``user_folders``: the user's cache folder.
- ``units``: counts, sizes, times and rates as text.
"""
