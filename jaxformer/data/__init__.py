"""Text on its way into and out of a model.

A corpus is named or is a text file; a tokenizer makes ids of it. The batches themselves are part of
the mirror (``char_data``), as both frameworks must draw the same ones.

- ``corpora``: the texts to train on, by name or path, with their hashes.
- ``tokenizers``: text to ids and back with a Hugging Face ``tokenizer.json``.
- ``chat``: a conversation as text, by the chat template beside a model.
- ``text_generation``: a prompt to ids, generated ids to text as they come, and their speed.
"""
