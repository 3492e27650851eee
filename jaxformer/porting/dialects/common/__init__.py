"""What the declarations of several families share.

- ``hugging_face``: the adapter of a family of Hugging Face; rules that several have.
- ``hugging_face_settings``: rows of settings tables: sizes, activations, rotary positions, windows.
- ``reading``: settings read from PyTorch modules and from the shapes of arrays.
- ``buffers``: arrays that are not parameters: masks, sinusoids, rotary tables.
- ``signatures``, ``torch_signatures``: jaxformer modules that are called as the imported ones are.
"""
