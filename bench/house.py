"""The size of the package, as a reader meets it: lines by kind, files, functions, and what the RL program imports.

python -m bench.house [FOLDER]        FOLDER is a checkout, this one by default; nothing of it is run
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from pathlib import Path

RL_PROGRAMS = ("mcore_rl.programs.rl", "mcore_rl.run.programs.rl")
"""Module of the RL program, today's and before the rooms got their names."""


def python_files(folder: Path, *names: str) -> list[Path]:
    """Return all Python files below some folders, sorted."""
    return sorted(file for name in names for file in (folder / name).rglob("*.py"))


def lines_by_kind(text: str) -> Counter[str]:
    """Count the lines of a file that are imports, docstrings, comments, blank, and code."""
    lines = text.splitlines()
    kinds = ["blank" if not line.strip() else "code" for line in lines]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1].lstrip().startswith("#"):
            kinds[token.start[0] - 1] = "comments"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds[node.lineno - 1 : node.end_lineno] = ["imports"] * (node.end_lineno - node.lineno + 1)
        # A string that is a statement documents what stands before it, also behind a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            kinds[node.lineno - 1 : node.end_lineno] = ["docstrings"] * (node.end_lineno - node.lineno + 1)
    return Counter(kinds)


def function_lengths(text: str) -> list[int]:
    """Return the number of lines of each function and method, without decorators."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return [node.end_lineno - node.lineno + 1 for node in functions]


def import_closure(folder: Path, program: str) -> dict[str, int]:
    """Return the modules of mcore_rl that importing `program` imports, with their lines.

    Only imports at the top of modules count, and those in a block there, but for `if TYPE_CHECKING`; packages above a
    module count too.
    """
    files = {
        ".".join(file.relative_to(folder).with_suffix("").parts): file for file in python_files(folder, "mcore_rl")
    }
    files |= {name.removesuffix(".__init__"): file for name, file in files.items() if name.endswith(".__init__")}
    closure: dict[str, int] = {}
    queue = [program]
    while queue:
        module = queue.pop()
        if module in closure or module not in files:
            continue
        text = files[module].read_text(encoding="utf-8")
        closure[module] = text.count("\n")
        queue.append(module.rpartition(".")[0])
        queue += imported_at_the_top(ast.parse(text).body)
    return closure


def imported_at_the_top(body: list[ast.stmt]) -> list[str]:
    """Return the names that statements import, each also as a module in the package that it is imported from."""
    names = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            names += imported_at_the_top([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            names += imported_at_the_top(node.body)
    return names


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    folder = parser.parse_args().folder
    package = python_files(folder, "mcore_rl", "launch")
    texts = [file.read_text(encoding="utf-8") for file in package]
    kinds = sum((lines_by_kind(text) for text in texts), Counter())
    print(f"mcore_rl + launch: {sum(kinds.values()):,} lines of Python in {len(package)} files")
    for kind, count in kinds.most_common():
        print(f"  {kind:<12}{count:>8,}  {count / sum(kinds.values()):.0%}")
    short = sum(text.count("\n") < 60 for text in texts)
    print(f"  files under 60 lines: {short}")
    lengths = [length for text in texts for length in function_lengths(text)]
    middle, mean = statistics.median(lengths), statistics.fmean(lengths)
    print(f"functions: {len(lengths):,}, median {middle:.0f} lines, mean {mean:.1f}")
    tests = python_files(folder, "tests")
    num_lines = sum(file.read_text(encoding="utf-8").count("\n") for file in tests)
    print(f"tests: {num_lines:,} lines in {len(tests)} files")
    for program in RL_PROGRAMS:
        if closure := import_closure(folder, program):
            print(f"imported by {program}: {len(closure)} modules, {sum(closure.values()):,} lines")


if __name__ == "__main__":
    main()
