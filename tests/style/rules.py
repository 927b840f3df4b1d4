"""The rules of DESIGN.md that ruff and mypy do not know, each as a function from a parsed file to its offences."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

FLOORS = (
    ("errors",),
    ("storage.files",),
    ("storage.checksums",),
    ("config",),
    ("families",),
    ("storage",),
    ("checks",),
    ("planning",),
    ("launch", "workers"),
    ("storage.foreign",),
    ("storage.megatron_lm",),
    ("megatron",),
    ("metrics",),
    ("replay",),
    ("data",),
    ("model",),
    ("storage.checkpoints",),
    ("convert", "train"),
    ("rl",),
    ("testing",),
    ("report",),
    ("programs",),
    ("cli",),
    ("api",),
    ("vllm_worker",),
)
"""From the bottom to the top; rooms that share a floor do not import one another. A room is a package of mcore_rl, or a
part of one that stands on another floor than the rest of it."""
LIGHT = {
    "errors", "storage.files", "storage.checksums", "config", "families", "storage", "checks", "planning", "launch",
    "report",
}  # fmt: skip
"""Rooms that answer without torch: help pages, login nodes and the report import them."""
REPORT_READS = {"errors", "storage.files", "config", "planning", "metrics", "report"}
MEGATRON_ROOMS = {"megatron", "replay", "data", "model", "storage.checkpoints", "train", "rl", "testing"}
COMPAT = "mcore_rl.megatron.patches.table"
FRAGMENTS = {"Of", "What", "That", "See", "So"}
HEAVY = {"torch", "megatron", "transformers", "numpy", "transformer_engine"}
MUTATORS = {"append", "add", "update", "setdefault", "pop", "extend", "insert", "clear", "remove", "popitem"}
MOVES = {"os.rename", "os.renames", "os.replace", "os.link", "shutil.move"}
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
CONTAINER_TYPES = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the package: where it is in the repository, and what is in it."""

    path: PurePosixPath
    text: str
    tree: ast.Module
    by_kind: dict[type[ast.AST], list[Any]]
    """All nodes of the tree by their class: a walk takes longer than most rules, each of which asks for a few."""

    @property
    def module(self) -> str:
        """Its dotted name; a package's for an `__init__.py`."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The room that it belongs to; "" for mcore_rl itself."""
        return room_of(self.module)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        """The nodes of these classes, each class in the order of a walk."""
        return (node for kind in kinds for node in self.by_kind.get(kind, ()))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and full dotted name of everything that is imported, wherever in the file."""
        for node in sorted(self.nodes(ast.Import, ast.ImportFrom), key=lambda node: node.lineno):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, package + alias.name) for alias in node.names)

    def functions(self) -> Iterator[Function]:
        """All functions and methods, inner ones too."""
        return self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)


def room_of(name: str) -> str:
    """The room of a dotted name: the longest of FLOORS that it begins with, or else its package; "" outside."""
    root, _, inside = name.partition(".")
    if root != "mcore_rl":
        return ""
    rooms = (room for floor in FLOORS for room in floor if f"{inside}.".startswith(f"{room}."))
    return max(rooms, key=len, default=inside.split(".")[0])


def parse(path: str, text: str) -> Source:
    """The source of `text`, as if it stood at `path`."""
    tree = ast.parse(text, filename=path)
    by_kind: dict[type[ast.AST], list[Any]] = {}
    for node in ast.walk(tree):
        by_kind.setdefault(type(node), []).append(node)
    return Source(PurePosixPath(path), text, tree, by_kind)


def imports_point_down(source: Source) -> Iterator[str]:
    """A package imports from its own and from lower floors only; `report` only from what needs no training."""
    here = _floor(source.room)
    for line, name in source.imports():
        target = room_of(name)
        there = _floor(target)
        if not name.startswith("mcore_rl.") or target == source.room or here is None or there is None:
            continue
        if there >= here:
            yield f"{source.path}:{line}: {source.room} is not above {target}"
        elif source.room == "report" and target not in REPORT_READS:
            yield f"{source.path}:{line}: report reads finished runs and imports nothing of {target}"


def packages_are_floors(source: Source) -> Iterator[str]:
    """Every package directly under mcore_rl is named in FLOORS."""
    if source.room and _floor(source.room) is None:
        yield f"{source.path}:1: {source.room} has no floor"


def _floor(room: str) -> int | None:
    return next((number for number, names in enumerate(FLOORS) if room in names), None)


def only_the_mesh_asks_parallel_state(source: Source) -> Iterator[str]:
    """`parallel_state` is process-global; everything but megatron/mesh.py is handed groups."""
    for line, name in source.imports():
        asks = name.startswith(("megatron.core.parallel_state", "megatron.core.mpu"))
        if asks and str(source.path) != "mcore_rl/megatron/mesh.py":
            yield f"{source.path}:{line}: imports {name}"
    # A patch stands in Megatron's place and has nobody to hand it a group.
    if str(source.path) == "mcore_rl/megatron/mesh.py" or source.path.is_relative_to("mcore_rl/megatron/patches"):
        return
    for node in source.nodes(ast.Attribute):
        if node.attr == "use_mpu_process_groups":
            yield f"{source.path}:{node.lineno}: asks Megatron for its groups"


def compiled_layers_have_one_door(source: Source) -> Iterator[str]:
    """Code for CPUs alone is entered from the table of layers, and asked for by the platform, which chooses layers."""
    doors = {
        "mcore_rl.megatron.compiled": ("model/layers/cpu", "megatron/platform.py"),
        "mcore_rl.model.layers.cpu": ("model/layers/cpu", "model/spec.py"),
    }
    for line, name in source.imports():
        for package, allowed in doors.items():
            is_inside = any(source.path.is_relative_to(f"mcore_rl/{path}") for path in allowed)
            if (name == package or name.startswith(f"{package}.")) and not is_inside:
                yield f"{source.path}:{line}: imports {name}"


def engines_are_one_protocol(source: Source) -> Iterator[str]:
    """Outside of rl/engines nobody asks of which class a rollout engine is: `Engine` has what a run needs."""
    if PurePosixPath("mcore_rl/rl/engines") in source.path.parents:
        return
    for node in source.nodes(ast.Call):
        if _dotted(node.func) == "isinstance":
            names = (_dotted(name).rpartition(".")[2] for name in ast.walk(node.args[1]))
            yield from (f"{source.path}:{node.lineno}: {name}" for name in names if name.endswith("Engine"))


def megatron_stays_in_its_packages(source: Source) -> Iterator[str]:
    """Programs, logs and configs do not know Megatron."""
    for line, name in source.imports():
        if name.split(".")[0] == "megatron" and source.room not in MEGATRON_ROOMS:
            yield f"{source.path}:{line}: imports {name}"


def imports_are_absolute(source: Source) -> Iterator[str]:
    """No dots in front, so that a floor can be read from the line."""
    for node in source.nodes(ast.ImportFrom):
        if node.level:
            yield f"{source.path}:{node.lineno}: relative import"


def nothing_prints(source: Source) -> Iterator[str]:
    """Output goes through metrics, or is written to a stream on purpose."""
    for node in source.nodes(ast.Call):
        if _dotted(node.func) == "print":
            yield f"{source.path}:{node.lineno}: print"


def errors_are_caught_by_name(source: Source) -> Iterator[str]:
    """No handler swallows whatever comes; one that ends in a `raise` swallows nothing."""
    for node in source.nodes(ast.ExceptHandler):
        if not _reraises(node):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(name is None or _dotted(name) in ("Exception", "BaseException") for name in caught):
                yield f"{source.path}:{node.lineno}: broad except"


def the_environment_is_read_in_its_rooms(source: Source) -> Iterator[str]:
    """An environment variable is an argument that no caller sees."""
    if source.room in ("megatron", "launch", "workers"):
        return
    for node in source.nodes(ast.Attribute):
        name = _dotted(node)
        if name in ("os.environ", "os.getenv", "os.putenv", "os.environb"):
            yield f"{source.path}:{node.lineno}: {name}"
    for line, name in source.imports():
        if name in ("os.environ", "os.getenv", "os.putenv"):
            yield f"{source.path}:{line}: {name}"


def only_files_renames(source: Source) -> Iterator[str]:
    """A finished file gets its name in storage/files.py alone, which knows what has to be on the disk before."""
    if source.module == "mcore_rl.storage.files":
        return
    for node in source.nodes(ast.Call):
        if _renames(node):
            yield f"{source.path}:{node.lineno}: {_dotted(node.func) or ast.unparse(node.func)} outside of files.py"
    for line, name in source.imports():
        if name in MOVES:
            yield f"{source.path}:{line}: {name}"


def _renames(call: ast.Call) -> bool:
    """Whether a call moves a file. A `replace` with one argument is Path's, as str's and datetime's have others."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if _dotted(call.func) in MOVES:
        return True
    is_path_method = len(call.args) == 1 and not call.keywords and _dotted(call.func.value) != "self"
    return call.func.attr in ("rename", "replace", "hardlink_to") and is_path_method


def module_globals_do_not_change(source: Source) -> Iterator[str]:
    """No `global`, and no container of a module that its functions fill."""
    containers = {name for statement in source.tree.body for name in _containers(statement)}
    for function in source.functions():
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield f"{source.path}:{node.lineno}: global {', '.join(node.names)}"
            for name in _changed(node):
                if name in containers:
                    yield f"{source.path}:{node.lineno}: changes {name} of the module"


IMPLEMENTED = {
    "families/": {"from_hf", "to_hf"},  # of Family
    "convert/": {"fill", "prefetch", "read", "run"},  # of TensorSource
    "data/": {"encode", "encode_marked", "decode", "prompt", "marked", "plain", "open_turn", "reply", "as_decoded"},
    "metrics/loggers.py": {"write"},  # of Sink
}
"""Methods that many classes have and that are documented once, where the interface is declared."""


def public_things_are_documented(source: Source) -> Iterator[str]:
    """Module, public classes, functions and methods say what they are."""
    if not ast.get_docstring(source.tree):
        yield f"{source.path}:1: no docstring"
    definitions: list[ast.ClassDef | Function] = []
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef | Function):
            definitions.append(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            known = {name for part, names in IMPLEMENTED.items() if part in str(source.path) for name in names}
            definitions += [each for each in node.body if isinstance(each, Function) and each.name not in known]
    for node in definitions:
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


def docstrings_have_a_subject(source: Source) -> Iterator[str]:
    """A docstring is read alone, in an editor's pop-up: one that begins with these words has no subject."""
    for node in source.nodes(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        for statement in node.body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            text = statement.value.value
            if isinstance(text, str) and text.lstrip().split(" ")[0] in FRAGMENTS:
                yield f"{source.path}:{statement.lineno}: a docstring begins with {text.split()[0]}"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (
    imports_point_down, packages_are_floors, only_the_mesh_asks_parallel_state, compiled_layers_have_one_door,
    engines_are_one_protocol, megatron_stays_in_its_packages, imports_are_absolute, nothing_prints,
    errors_are_caught_by_name, the_environment_is_read_in_its_rooms, only_files_renames, module_globals_do_not_change,
    public_things_are_documented, docstrings_have_a_subject,
)  # fmt: skip


def patches_come_before_megatron(sources: Sequence[Source]) -> Iterator[str]:
    """A package above a module that uses Megatron imports the patches first; they import it in functions only."""
    first = {source.module: next(source.imports(), (0, ""))[1] for source in sources if source.path.stem == "__init__"}
    patched = tuple(f"{package}." for package, name in first.items() if name.startswith(COMPAT))
    for source in sources:
        if source.module.startswith(COMPAT.rpartition(".")[0]):
            at_top = (node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom))
            if any(_is_megatron(name) for node in at_top for name in _names(node)):
                yield f"{source.path}:1: imports Megatron before it is patched"
        elif _uses_megatron(source) and not source.module.startswith(patched):
            yield f"{source.path}:1: uses Megatron: import {COMPAT} first in the __init__.py of a package above it"


def light_packages_stay_light(sources: Sequence[Source]) -> Iterator[str]:
    """Nothing that a light package imports, directly or by way of others, imports torch or another heavy package."""
    modules = {source.module: source for source in sources}
    graph = {name: _imported_modules(source, set(modules)) for name, source in modules.items()}
    for name, source in modules.items():
        if source.room not in LIGHT:
            continue
        reached, queue = {name}, [name]
        while queue:
            new = graph[queue.pop()] - reached
            reached |= new
            queue += new
        for other in sorted(reached):
            for line, imported in modules[other].imports():
                if imported.split(".")[0] in HEAVY:
                    yield f"{modules[other].path}:{line}: {name} must stay light, and this imports {imported}"


def modules_do_not_go_in_circles(sources: Sequence[Source]) -> Iterator[str]:
    """No module imports itself by way of others."""
    modules = {source.module for source in sources}
    graph = {source.module: _imported_modules(source, modules) for source in sources}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> Iterator[str]:
        if module in path:
            yield " imports ".join((*path[path.index(module) :], module))
        elif module not in done:
            for imported in sorted(graph[module]):
                yield from visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        yield from visit(module, ())


def names_differ_on_a_floor(sources: Sequence[Source]) -> Iterator[str]:
    """No two packages of one floor, folders within a package counted apart, define the same public name.

    `main` is excepted: it is what a program is started by.
    """
    first: dict[tuple[int, str], Source] = {}
    for source in sources:
        floor = _floor(source.room)
        for line, name in _public_names(source):
            if floor is None or name == "main":
                continue
            other = first.setdefault((floor, name), source)
            if other.path.parent != source.path.parent:
                yield f"{source.path}:{line}: {name} is a name of {other.path} too"


TREE_RULES: tuple[Callable[[Sequence[Source]], Iterator[str]], ...] = (
    patches_come_before_megatron,
    light_packages_stay_light,
    modules_do_not_go_in_circles,
    names_differ_on_a_floor,
)


def _public_names(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and names of what a module defines at its top: functions, classes, constants."""
    for node in source.tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, Function | ast.ClassDef):
            targets = [ast.Name(node.name)]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield node.lineno, target.id


def _uses_megatron(source: Source) -> bool:
    return any(_is_megatron(name) for _, name in source.imports())


def _is_megatron(name: str) -> bool:
    return name.split(".")[0] == "megatron"


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]


def _imported_modules(source: Source, modules: set[str]) -> set[str]:
    found = set()
    for _, name in source.imports():
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", source.module}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _reraises(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.body[-1], ast.Raise)


def _containers(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement of a module gives a container to."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return
    value = statement.value
    made = isinstance(value, ast.Call) and _dotted(value.func).rpartition(".")[2] in CONTAINER_TYPES
    if made or isinstance(value, CONTAINERS):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _changed(node: ast.AST) -> Iterator[str]:
    """Names of the containers that a node changes in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign):
        targets = [node.target]
    yield from (_dotted(target.value) for target in targets if isinstance(target, ast.Subscript))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        yield _dotted(node.func.value)
