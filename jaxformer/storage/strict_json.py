"""JSON read from files that may be damaged or malicious."""

import itertools
import json
from typing import Any

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.storage.local_files import safe_repr

# Brackets cost twenty times their size once parsed; a tensor has three of them.
MAX_BRACKETS = 3_000_000


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object in which no key occurs twice.

    Args:
        data: UTF-8.
        where: what it is called, for messages.

    Raises:
        CheckpointError: it is no JSON object.
        UnsafeFileError: a key occurs twice, or it has more entries than any checkpoint.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = sorted(name for name, _ in pairs)
            twice = next(a for a, b in itertools.pairwise(names) if a == b)
            # Two readers of such a file may see two different models.
            raise UnsafeFileError(
                f"{where} names {safe_repr(twice)} more than once; do not use this file"
            )
        return result

    if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        raise UnsafeFileError(
            f"{where} has more entries than any checkpoint ({MAX_BRACKETS // 3} are allowed); "
            "do not use this file"
        )
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=once)
        # A lone half of a surrogate pair is no text: it could be neither shown nor written again.
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UnsafeFileError(
            f"{where} is nested too deeply for a checkpoint; do not use this file"
        ) from None
    except ValueError as error:
        at = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise CheckpointError(
            f"{where} is not JSON{at}: the file is not complete or not of this kind; fetch it again"
        ) from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is not a JSON object; fetch the file again")
    return parsed
