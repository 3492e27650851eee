"""Checkpoint files of every format, read and written without PyTorch and without knowing a model.

A path enters; what leaves is a ``RawCheckpoint``: arrays by the names in the file, each read when
it is needed, and what is stored beside them. Files may be damaged or malicious: every size is
checked before memory is allocated, and no code of a file runs.

- ``detection``: which format a path has. ``raw_checkpoints``: reads any of them.
- ``tensors``: ``StoredTensor``, an array that can be read. ``arrays``: arrays in memory as such.
- ``safetensors_files``: reads and writes safetensors files, and reads several by their index.
- ``torch_files`` reads files of ``torch.save`` and ``torch_writer`` writes them; ``torch_archive``
  is their zip archive, ``torch_unpickler`` their pickle, ``torch_dtypes`` the names of dtypes;
  ``torch_entries``: what people keep in such a file, and what of it is not read.
- ``trainer_folders``: what transformers' Trainer keeps beside the weights of a folder.
- ``plain_pickle``: the machine that executes pickles of plain data. ``trees``: nested containers.
- ``download``: fetches one file over the network.
"""
