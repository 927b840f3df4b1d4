"""Tests in one process and the program that they test in another: what passes between the two.

The source of this module runs at both ends of two pipes, in sandboxes, on the standard library of Python 3.10 or newer.
The program's process may send anything. The tests' process takes plain data from it, and a `Remote` for every other
object. No operator on a Remote gives the program the other operand, so that an object of the program is never asked
whether it is what a test wants.
"""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

PROGRAM, TESTS = "program", "__tests__"
"""Names of the program's module and of the tests' module."""
RAISED = BaseException
"""Errors that are sent: a program raises whatever it likes, also SystemExit."""
SCALARS = {type(None), bool, int, float, str}
MUTABLE: dict[str, type] = {"list": list, "dict": dict, "set": set}
"""Types of arguments that a call may change. Their contents are sent beside the value that refers to them."""
PARTS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "collections.Counter": lambda value: (dict(value),),
    "numpy.ndarray": lambda value: (value.tolist(), str(value.dtype)),
    **dict.fromkeys(("builtins.frozenset", "builtins.bytes", "builtins.bytearray"), lambda value: (list(value),)),
    **dict.fromkeys(
        (
            *("builtins.range", "builtins.slice", "fractions.Fraction", "decimal.Decimal"),
            *("datetime.date", "datetime.time", "datetime.datetime", "datetime.timedelta"),
        ),
        lambda value: value.__reduce__()[1],
    ),
}
"""Arguments of the constructor of each further type that is sent as data."""
BASES: tuple[Any, ...] = (int, float, complex, bytes, list, tuple, set, frozenset, dict)
IMPORTED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
TO_TESTS = ("call", "iter", "next", "len", "eq", "ne", "hash", "bool", "getattr", "setattr")
"""Operations that the program may ask for, on objects that a test has passed to it."""


class Remote:
    """An object of the other process: operations on it run there, or here on its data."""

    __slots__ = ("_number_", "_peer_")

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_peer_", peer)
        object.__setattr__(self, "_number_", number)

    def __getattr__(self, name: str) -> Any:
        # numpy would look for __array_interface__, and read the memory that it names.
        if name.startswith("__") and name not in ("__name__", "__dict__"):
            raise AttributeError(name)
        return self._peer_.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer_.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object. Raises a RuntimeError instead of StopIteration, and what the object raises."""
        try:
            return self._peer_.ask("call", self, args, kwargs)
        except StopIteration as error:  # it would end all(map(...)) of a test before the first comparison
            raise RuntimeError("a call raised StopIteration") from error

    def __instancecheck__(self, instance: Any) -> Any:
        return self._peer_.ask("isinstance", instance, self)


def _data(remote: Any) -> Any:
    """Return the data of a Remote. What cannot change is asked for once: it may not be 9 now and 10 in `9 < x < 10`."""
    known, number = remote._peer_.known_data, remote._number_
    data = known[number] if number in known else remote._peer_.ask("plain", remote)
    if type(data) not in MUTABLE.values():
        known[number] = data
    return data


def _define_operators() -> None:
    def unary(name: str) -> Any:
        return lambda self, *args: self._peer_.ask(name, self, *args)

    def binary(name: str, function: Any) -> Any:
        def apply(self: Any, other: Any) -> Any:
            if type(other) is Remote:
                return self._peer_.ask(name, self, other)
            return name == "ne" if other is None and name in ("eq", "ne") else function(_data(self), other)

        return apply

    for name in "len next str repr hash bool iter reversed getitem setitem delitem neg pos abs invert".split():
        setattr(Remote, f"__{name}__", unary(name))
    for function in (float, int, round):
        setattr(Remote, f"__{function.__name__}__", lambda self, *args, of=function: of(_data(self), *args))
    for name in "eq ne lt le gt ge add sub mul truediv floordiv mod pow and_ or_ xor".split():
        function = getattr(operator, name)
        setattr(Remote, f"__{name.strip('_')}__", binary(name, function))
        setattr(Remote, f"__r{name.strip('_')}__", lambda self, other, of=function: of(other, _data(self)))


_define_operators()


class RemoteError:
    """Base of the errors of the program's own classes; attributes and text are those of the error in the program."""

    remote: Remote

    def __getattr__(self, name: str) -> Any:
        if name == "remote" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.remote, name)

    def __str__(self) -> str:
        return str(self.remote)


class Peer:
    """One end of the two pipes. Each end asks the other for operations, and answers while it waits."""

    def __init__(self, pipes: list[int], operations: dict[str, Callable[..., Any]], *, is_tests: bool) -> None:
        self._reader, self._writer = os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb")
        self._operations, self._is_tests = {"call": _call, "plain": plain, **operations}, is_tests
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[int, Any] = {}
        self.known_data: dict[int, Any] = {}
        """Data of objects of the other process that cannot change, by the object's number."""

    def ask(self, name: str, *args: Any) -> Any:
        """Return the value of an operation in the other process. Lists, dicts and sets in `args` change as there.
        Raises EOFError if that process has ended, and errors of the operation as they are.
        """
        boxes: list[Any] = []
        self._send("ask", self._packed((name, *args), boxes))
        while True:
            kind, root, contents = self._receive()
            if kind == "ask":
                self._answer(root, contents)
                continue
            value = self._unpacked(root, contents, boxes)
            if kind == "value":
                return value
            error = value[0](*value[1])
            if isinstance(error, RemoteError):
                error.remote = value[2]
            raise error

    def serve(self) -> None:
        """Answer until the other process ends."""
        with suppress(EOFError):
            while True:
                self._answer(*self._receive()[1:])

    def _send(self, kind: str, packed: list[Any]) -> None:
        with suppress(BrokenPipeError):  # then there is no answer either
            self._writer.write(json.dumps([kind, *packed]).encode() + b"\n")
            self._writer.flush()

    def _receive(self) -> Any:
        line = self._reader.readline()
        if not line:
            raise EOFError("the program has ended")
        return json.loads(line)

    def _answer(self, root: Any, contents: list[Any]) -> None:
        boxes: list[Any] = []
        try:
            name, *args = self._unpacked(root, contents, boxes)
            if self._is_tests:
                self._check(name, *args)
            function: Any = self._operations.get(name) or getattr(builtins, name, None) or getattr(operator, name)
            kind, packed = "value", self._packed(function(*args), boxes, contents)
        except RAISED as error:
            kind, packed = "error", self._packed((type(error), error.args, error), boxes, contents)
        self._send(kind, packed)

    def _check(self, name: str, target: Any, *args: Any) -> None:
        """Raise a PermissionError unless an object that a test has passed to the program permits this operation."""
        may = name in TO_TESTS and id(target) in self._numbers
        if may and name in ("getattr", "setattr"):
            # Functions and frames lead to the tests; only instances of the tests' classes show attributes.
            may = type(target).__module__ == TESTS and not args[0].startswith("_")
            may = may and (name == "getattr" or not callable(getattr(type(target), args[0], None)))
        if not may:
            raise PermissionError(f"a test's object does not permit {name}")

    def _packed(self, value: Any, boxes: list[Any], before: Iterable[Any] = ()) -> list[Any]:
        """Return a value as JSON: its root, and the contents of its lists, dicts and sets, which are added to `boxes`.
        None is sent for the first boxes' contents that equal `before`, which the other side has.
        """
        places = {id(box): place for place, box in enumerate(boxes)}

        def put(value: Any) -> Any:
            kind = type(value)
            if kind in SCALARS:
                return value
            if kind in MUTABLE.values():
                if places.setdefault(id(value), len(boxes)) == len(boxes):
                    boxes.append(value)
                return ["box", places[id(value)]]
            if kind is tuple:
                return ["tuple", *puts(value)]
            if kind is Remote:
                return ["yours", value._number_]
            if kind is types.ModuleType:
                return ["module", value.__name__]
            name = f"{kind.__module__}.{kind.__qualname__}"
            if name in PARTS:
                return [name, *puts(PARTS[name](value))]
            if isinstance(value, IMPORTED if self._is_tests else type):
                with suppress(Exception):
                    place = getattr(value, "__module__", None) or "builtins", value.__qualname__
                    if (self._is_tests or place[0] == "builtins") and _imported(*place) is value:
                        return ["imported", *place]
                if isinstance(value, type) and issubclass(value, BaseException):
                    base = next(kind for kind in value.__mro__ if kind.__module__ == "builtins")
                    own = [kind for kind in value.__mro__ if not issubclass(base, kind)]
                    return ["error", base.__name__, *([self._number(kind), kind.__name__] for kind in own)]
            is_own = kind.__module__ in (PROGRAM, TESTS)
            if kind.__module__ == "numpy" or (isinstance(value, (str, *BASES)) and not is_own):
                with suppress(TypeError):
                    return put(plain(value))
            return ["mine", self._number(value)]

        def puts(values: Iterable[Any]) -> list[Any]:
            values = list(values)
            return values if SCALARS.issuperset(map(type, values)) else [put(value) for value in values]

        root = put(value)
        contents: list[Any] = []
        for box in boxes:  # which grow meanwhile
            columns = (box, box.values()) if type(box) is dict else (box,)
            contents.append([type(box).__name__, *map(puts, columns)])
        for place, old in enumerate(before):
            contents[place] = None if contents[place] == old else contents[place]
        return [root, contents]

    def _unpacked(self, root: Any, contents: list[Any], boxes: list[Any]) -> Any:
        """Return the value of `_packed`, and add its lists, dicts and sets to `boxes`; those in `boxes` are updated."""
        boxes += [MUTABLE[kind]() for kind, *_ in contents[len(boxes) :]]

        def get(item: Any) -> Any:
            if type(item) is not list:
                return item
            kind, *parts = item
            if kind == "box":
                return boxes[parts[0]]
            if kind == "tuple":
                return tuple(gets(parts))
            if kind == "yours":
                return self._objects[parts[0]]
            if kind == "mine":
                return self._remotes.setdefault(parts[0], Remote(self, parts[0]))
            if kind == "module" and parts[0] != "__main__":
                return importlib.import_module(parts[0])
            if kind == "imported":
                found = _imported("builtins" if self._is_tests else parts[0], parts[1])
                if not self._is_tests or isinstance(found, type):
                    return found
            if kind == "error" and issubclass(error := getattr(builtins, parts[0]), BaseException):
                for number, name in reversed(parts[1:]):
                    bases = (error,) if issubclass(error, RemoteError) else (RemoteError, error)
                    error = self._errors.setdefault(number, type(name, bases, {"__module__": PROGRAM}))
                return error
            if kind in PARTS:
                return _imported(*kind.replace("ndarray", "array").split("."))(*gets(parts))
            raise ValueError(f"the program sent {kind!r}")

        def gets(items: list[Any]) -> list[Any]:
            return [get(item) for item in items] if list in set(map(type, items)) else items

        # From the last: a frozenset is made when the list of its elements, which is sent after it, is filled.
        for box, content in reversed(list(zip(boxes, contents, strict=True))):
            if content is not None:
                columns = [gets(column) for column in content[1:]]
                box.clear()
                (box.extend if type(box) is list else box.update)(
                    zip(*columns, strict=True) if type(box) is dict else columns[0]
                )
        return get(root)

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number


def plain(value: Any) -> Any:
    """Return an object's data: that of the builtin type which its class extends, or of numpy. Raises TypeError."""
    if isinstance(value, str):
        return str.__str__(value)
    for kind in BASES:
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an object of the program, of class {type(value).__name__}, is not compared with values")


def _call(function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _imported(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _start() -> tuple[dict[str, Any], int]:
    """Return what standard input gives, and a copy of standard output; the program and the tests have neither."""
    given, output, nowhere = json.loads(sys.stdin.buffer.read()), os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    return given, output


def serve_program() -> None:
    """Run the program, and answer what its tests ask."""
    given, output = _start()
    os.close(output)
    module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)

    def names() -> list[str]:
        exec(compile(given["program"], "program.py", "exec"), vars(module))
        return list(vars(module))

    Peer(given["pipes"], {"names": names, "value": vars(module).__getitem__}, is_tests=False).serve()


def run_tests() -> None:
    """Run the tests, and write the index of each one that passes to standard output."""
    given, output = _start()
    peer = Peer(given["pipes"], {}, is_tests=True)
    used = set()
    for test in given["tests"]:
        with suppress(SyntaxError):
            used |= {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    values = {name: peer.ask("value", name) for name in used.intersection(peer.ask("names")) if name[:2] != "__"}
    own = {name for name, value in values.items() if not isinstance(value, types.ModuleType)}
    # A program's own `abs` or `math` must not decide what a test compares; a test of `sum` itself uses no other name.
    reserved = own & {*vars(builtins), *sys.stdlib_module_names} if len(own) > 1 else ()
    names = {name: value for name, value in values.items() if name not in reserved}
    names["__name__"] = TESTS
    for index, test in enumerate(given["tests"]):
        try:
            exec(compile(test, f"test {index + 1}", "exec"), names)
        except RAISED as error:
            traceback.print_exception(type(error), error, error.__traceback__)
        else:
            os.write(output, f"{index}\n".encode())
