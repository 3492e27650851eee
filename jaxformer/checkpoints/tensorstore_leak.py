"""A way round a leak in TensorStore, by which every save would cost memory for good."""

import collections
import copy
import functools
from typing import Any

# How many specifications are remembered: those of one save are the same few for all its arrays.
REMEMBERED = 8


@functools.cache
def patch_tensorstore_leak() -> None:
    """Lets TensorStore make the JSON of a key-value store's specification once, for this process.

    ``KvStore.Spec.to_json`` never frees the strings it has made: 350 bytes a call, in all versions
    from 0.1.60 to 0.1.86. Orbax calls it for each array of each save, with the same specification.
    """
    import tensorstore

    make = tensorstore.KvStore.Spec.to_json
    known: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=REMEMBERED)

    def to_json(self: Any, *args: Any, **options: Any) -> Any:
        if args or options:
            return make(self, *args, **options)
        for spec, made in list(known):
            if spec == self:
                return copy.deepcopy(made)
        made = make(self)
        known.append((self, made))
        return copy.deepcopy(made)

    tensorstore.KvStore.Spec.to_json = to_json  # type: ignore[method-assign]
