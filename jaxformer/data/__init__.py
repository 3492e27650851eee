"""Text on its way into and out of a model.

A corpus is named or is a text file; a tokenizer makes ids of it. Larger ones become folders of
tokens first. The batches themselves are part of the mirror (``char_data``, ``token_data``,
``sampling``, ``packing``), as both frameworks must draw the same ones.

- ``corpora``: the texts to train on, by name or path, with their hashes.
- ``tokenizers``: text to ids and back with a Hugging Face ``tokenizer.json``.
- ``encoding``: a text of any length to ids, piece by piece.
- ``token_folders``: a folder of tokens as something to train on.
- ``making``: a folder of tokens from its settings, of the ``sources`` that are read (``compressed``
  ones too), by the ``encoders`` that make ids, in the processes of ``tokenization``, as the
  ``shards`` that are written.
- ``hub``: datasets of the Hugging Face hub, fetched if the user wants it.
- ``chat``: a conversation as text, by the chat template beside a model; ``conversations``: records
  of prompts and answers, of which the answers count.
- ``text_generation``: a prompt to ids, generated ids to text as they come, and their speed.
"""
