"""Local files: reading them safely, and writing them so that they survive a crash.

What is read may be damaged or malicious, so sizes are checked before memory is allocated, and what
is found is quoted in messages only as short printable text. What is written appears under its name
only when it is complete and on the disk. This package knows nothing of models or checkpoints.

- ``local_files``: ``LocalFile`` reads a file by position and notices if it changes meanwhile.
- ``durable_files``: atomic writes, syncing, temporary names, hashes and free space.
- ``downloads``: what another machine gives, by https alone.
- ``strict_json``: JSON in which no key may occur twice.
"""
