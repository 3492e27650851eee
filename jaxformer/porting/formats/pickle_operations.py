"""The instructions of a pickle that are carried out, each as a function of the machine."""

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.porting.formats.plain_pickle import PlainUnpickler


def _mark(machine: "PlainUnpickler") -> None:
    machine.count()
    machine.outer.append(machine.stack)
    machine.stack = []


def _tuple(count: int) -> Callable[["PlainUnpickler"], None]:
    def operation(machine: "PlainUnpickler") -> None:
        machine.push(tuple([machine.pop() for _ in range(count)][::-1]))

    return operation


def _set_items(machine: "PlainUnpickler", pairs: list[Any]) -> None:
    target = machine.top(dict)
    if len(pairs) % 2:
        machine.damaged("a key has no value")
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        target[machine.key(key)] = value


def _set_item(machine: "PlainUnpickler") -> None:
    value, key = machine.pop(), machine.pop()
    _set_items(machine, [key, value])


def _append(machine: "PlainUnpickler") -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _extend(machine: "PlainUnpickler") -> None:
    values = machine.pop_mark()
    machine.top(list).extend(values)


def _add_items(machine: "PlainUnpickler") -> None:
    values = machine.pop_mark()
    machine.top(set).update(machine.key(value) for value in values)


def _memoize(machine: "PlainUnpickler", place: int) -> None:
    machine.count()
    value = machine.pop()
    machine.stack.append(value)
    machine.memo[place] = value


def _get(machine: "PlainUnpickler", place: int) -> None:
    if place not in machine.memo:
        machine.damaged(f"it refers to value {place}, which is not there")
    machine.stack.append(machine.memo[place])


def _global(machine: "PlainUnpickler") -> None:
    module, name = machine.line(), machine.line()
    machine.push(machine.find(module, name))


def _stack_global(machine: "PlainUnpickler") -> None:
    name, module = machine.pop(), machine.pop()
    if type(name) is not str or type(module) is not str:
        machine.unsafe("names something by other than text")
    machine.push(machine.find(module, name))


def _reduce(machine: "PlainUnpickler") -> None:
    arguments, function = machine.pop(), machine.pop()
    if type(arguments) is not tuple:
        machine.damaged("it calls something without arguments")
    machine.push(machine.reduce(function, arguments))


def _build(machine: "PlainUnpickler") -> None:
    state, target = machine.pop(), machine.pop()
    machine.build(target, state)
    machine.stack.append(target)


def _scalar(layout: str) -> Callable[["PlainUnpickler"], None]:
    return lambda m: m.stack.append(m.number(layout))


def _bytes(layout: str) -> Callable[["PlainUnpickler"], None]:
    return lambda m: m.push(m.take(m.number(layout)))


def _text(layout: str) -> Callable[["PlainUnpickler"], None]:
    return lambda m: m.push(m.text(m.take(m.number(layout))))


def _long(machine: "PlainUnpickler") -> None:
    machine.push(int.from_bytes(machine.take(machine.number("<B")), "little", signed=True))


OPERATIONS: dict[bytes, Callable[["PlainUnpickler"], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: _mark,
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT: _scalar("<i"),
    pickle.BININT1: _scalar("<B"),
    pickle.BININT2: _scalar("<H"),
    pickle.LONG1: _long,
    pickle.BINFLOAT: _scalar(">d"),
    pickle.BINUNICODE: _text("<I"),
    pickle.SHORT_BINUNICODE: _text("<B"),
    pickle.BINUNICODE8: _text("<Q"),
    pickle.BINBYTES: _bytes("<I"),
    pickle.SHORT_BINBYTES: _bytes("<B"),
    pickle.BINBYTES8: _bytes("<Q"),
    pickle.EMPTY_TUPLE: _tuple(0),
    pickle.TUPLE1: _tuple(1),
    pickle.TUPLE2: _tuple(2),
    pickle.TUPLE3: _tuple(3),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_mark())),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: _append,
    pickle.APPENDS: _extend,
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: lambda m: _set_items(m, m.pop_mark()),
    pickle.EMPTY_SET: lambda m: m.push(set()),
    pickle.ADDITEMS: _add_items,
    pickle.BINPUT: lambda m: _memoize(m, m.number("<B")),
    pickle.LONG_BINPUT: lambda m: _memoize(m, m.number("<I")),
    pickle.MEMOIZE: lambda m: _memoize(m, len(m.memo)),
    pickle.BINGET: lambda m: _get(m, m.number("<B")),
    pickle.LONG_BINGET: lambda m: _get(m, m.number("<I")),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.REDUCE: _reduce,
    pickle.BUILD: _build,
    pickle.BINPERSID: lambda m: m.push(m.persistent(m.pop())),
}
