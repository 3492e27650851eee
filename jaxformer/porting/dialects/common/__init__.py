"""What the declarations of several families share.

- ``hugging_face``: the adapter of a family of Hugging Face, its body and its heads.
- ``hugging_face_images``: the adapter of a family that reads images.
- ``task_heads``: classes that classify: a body and a head; ``labels``: the names of its classes.
- ``halves``: encoders and decoders that have a class of their own.
- ``stacks``: rules of stacks of blocks.
- ``transformers_types``: what transformers declares of each model type: classes, defaults.
- ``hugging_face_settings``: rows of settings tables: sizes, activations, factors.
- ``rotary_settings``, ``layer_patterns``: rows of rotary positions, and of what differs between
  layers.
- ``known_settings``: settings that any config.json may hold.
- ``reading``: settings read from PyTorch modules and from the shapes of arrays.
- ``buffers``: arrays that are not parameters: masks, sinusoids, rotary tables.
- ``signatures``, ``torch_signatures``: jaxformer modules that are called as the imported ones are.
"""
