"""The code of an exported model: pkmlm's own files, flat, with their imports rewritten.

`transformers` copies the files next to modeling_pkmlm.py that are imported from it, directly or not, by lines such as
`from .memory_table import Values`. Such lines take the place of `from pkmlm.memory.table import Values` in every file
that modeling_pkmlm.py leads to. What is imported for type checkers alone is left out.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the package
PACKAGE = ROOT.name
OWN = f"{PACKAGE}.export."  # these files keep their names
MODEL = (f"{OWN}configuration_pkmlm", f"{OWN}modeling_pkmlm")
# An export has kernels in plain torch, and trains in one process.
INSTEAD = dict.fromkeys((f"{PACKAGE}.kernels.backend", f"{PACKAGE}.distributed"), f"{OWN}plain_pkmlm")


def bundle(*modules: str) -> dict[str, str]:
    """The files of modules and of all that they import from this package: name -> text."""
    found: dict[str, str] = {}
    waiting = [*modules]
    while waiting:
        module = waiting.pop()
        if (name := f"{flat(module)}.py") not in found:
            found[name], imported = rewritten(path_of(module).read_text(encoding="utf-8"))
            waiting += imported
    return dict(sorted(found.items()))


def flat(module: str) -> str:
    """What a module is called in an export."""
    return module.removeprefix(OWN).removeprefix(f"{PACKAGE}.").replace(".", "_")


def path_of(module: str) -> Path:
    """The file of a module of this package; a package has none."""
    return ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")


def rewritten(text: str) -> tuple[str, list[str]]:
    """A file with its imports rewritten, and the modules that it then imports."""
    lines, imported = text.splitlines(keepends=True), []
    for node in reversed([*imports_of(ast.parse(text))]):
        new: list[str] = []
        for module, line in relative(node) if isinstance(node, ast.ImportFrom) else ():
            imported.append(module)
            new.append(f"{' ' * node.col_offset}{line}\n")
        lines[node.lineno - 1 : node.end_lineno] = new
    return "".join(lines), imported


def imports_of(tree: ast.AST) -> Iterator[ast.ImportFrom | ast.If]:
    """The imports from this package, wherever they stand, and the blocks for type checkers, from first to last."""
    for node in ast.iter_child_nodes(tree):
        of_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if of_types or (isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}.")):
            assert isinstance(node, ast.ImportFrom | ast.If)
            yield node
        else:
            yield from imports_of(node)


def relative(node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The modules that an import needs, and the lines that take its place."""
    source = node.module or ""
    if path_of(source).is_file():
        module = INSTEAD.get(source, source)
        names = ", ".join(f"{each.name} as {each.asname}" if each.asname else each.name for each in node.names)
        yield module, f"from .{flat(module)} import {names}"
        return
    for each in node.names:  # a module of a package, as `from pkmlm.kernels import ops`
        module = INSTEAD.get(f"{source}.{each.name}", f"{source}.{each.name}")
        # transformers does not see the second line.
        yield module, f"from .{flat(module)} import __name__ as _"
        yield module, f"from . import {flat(module)} as {each.asname or each.name}"
