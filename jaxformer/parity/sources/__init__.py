"""What ``jaxformer verify`` compares: checkpoints as models that run, and tokens for them.

Two paths enter; a PyTorch module (A, the reference), a JAX module (B, the candidate) and token ids
leave.

- ``checkpoints``: opens A and B, checks that their architectures are equal, and loads both.
- ``same_form``: brings B into the form of A, where one model can be stored in two ways.
- ``transformers_folders``: loads a Hugging Face folder with ``transformers``.
- ``inputs``: the ids, images or features that both are called with.
- ``tokens``: random token ids, or those of a text.
"""
