"""Folders of tokens, written by hand: what `jaxformer tokenize` and nanoGPT leave."""

import hashlib
import json
import pickle

import numpy as np


def write_folder(
    path, splits, *, vocab_size, shard=1000, dtype="uint16", documents=None, answers=None, **more
):
    """Writes ids by split into shards of so many, and their index.

    ``documents`` says by split where documents begin, ``answers`` which ids belong to answers.
    """
    path.mkdir(parents=True, exist_ok=True)
    index = {"format": "jaxformer-tokens", "version": 1, "dtype": dtype, "vocab_size": vocab_size}
    index |= {"splits": {}, **more}
    for name, ids in splits.items():
        shards = []
        for number, begin in enumerate(range(0, len(ids), shard)):
            data = np.asarray(ids[begin : begin + shard]).astype(dtype).tobytes()
            file = f"{name}-{number:05}.bin"
            (path / file).write_bytes(data)
            tokens = len(data) // np.dtype(dtype).itemsize
            digest = hashlib.sha256(data).hexdigest()
            shards.append({"file": file, "tokens": tokens, "sha256": digest})
            if documents is not None:
                starts = np.asarray(documents[name])
                inside = starts[(starts >= begin) & (starts < begin + tokens)] - begin
                inside.astype("<u8").tofile(path / f"{file}.documents")
                found = {"file": f"{file}.documents", "count": len(inside)}
                shards[-1]["documents"] = found
            if answers is not None:
                part = np.asarray(answers[name])[begin : begin + shard]
                part.astype("u1").tofile(path / f"{file}.answers")
                shards[-1]["answers"] = {"file": f"{file}.answers"}
        index["splits"][name] = {"tokens": len(ids), "shards": shards}
    (path / "index.json").write_text(json.dumps(index))
    return path


def write_nanogpt(path, splits, vocabulary=None):
    """Writes ids by split as nanoGPT's prepare.py does."""
    path.mkdir(parents=True, exist_ok=True)
    for name, ids in splits.items():
        np.asarray(ids).astype(np.uint16).tofile(path / f"{name}.bin")
    if vocabulary is not None:
        meta = {
            "vocab_size": len(vocabulary),
            "itos": dict(enumerate(vocabulary)),
            "stoi": {c: i for i, c in enumerate(vocabulary)},
        }
        (path / "meta.pkl").write_bytes(pickle.dumps(meta))
    return path
