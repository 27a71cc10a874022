"""The house rules that a program can check: which way imports go, and what must not stand in the source."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from tests import PATIENCE

PACKAGE, TESTS = (Path(__file__).parents[2] / name for name in ("pkmlm", "tests"))
FILES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
OWN = {path: tree for path, tree in FILES.items() if not path.stem.endswith("_pkmlm")}  # others leave with exports
# A room may import from rooms of a lower number, and from itself.
FLOORS = {
    "errors": 0,
    "console": 1,
    "signals": 2,
    "seeds": 2,
    "environment": 2,
    "files": 2,
    "kernels": 2,
    "device": 3,
    "distributed": 3,
    "launched": 4,
    "memory": 4,
    "recipe": 5,
    "data": 6,
    "model": 6,
    "runs": 7,
    "cost": 7,
    "cost_tables": 8,
    "export": 8,
    "evaluate": 9,
    "measure": 10,
    "report": 11,
    "train": 12,
    "attach": 13,
    "bench": 13,
    "sweep": 14,
    "cli": 15,
    "__main__": 16,
    "__init__": 16,  # the Python front door, which imports lazily
}
# What others put into their own networks, and exports ship: these import nothing of the tool.
LIBRARY_ROOMS = {"memory", "kernels", "distributed", "errors", "seeds"}
HEAVY = {"torch", "numpy", "scipy", "sentencepiece", "matplotlib", "pyarrow", "safetensors", "rich", "lm_eval"}
HEAVY |= {"datasets", "pydantic", "tokenizers"}


def room(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imports(tree: ast.AST) -> list[str]:
    """Every module that is imported, at the top or inside a function, with `from a import b` as a.b."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_imports_go_one_way():
    for path, tree in OWN.items():
        own = room(path)
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)), path
        for name in imports(tree):
            parts = name.split(".")
            needs_host = path.match("attach/hosted.py") or path.match("attach/tokens.py")
            assert parts[0] != "transformers" or needs_host, f"{path} imports what pkmlm does not need"
            if parts[0] == "pkmlm" and len(parts) > 1 and parts[1] in FLOORS:
                assert parts[1] == own or FLOORS[parts[1]] < FLOORS[own], f"{path} imports {name}"


def test_memories_and_kernels_import_nothing_of_the_tool():
    for path, tree in OWN.items():
        if room(path) in ("memory", "kernels"):
            assert own_rooms(set(imports(tree))) <= LIBRARY_ROOMS, path


def test_no_imports_go_in_a_circle():
    modules = {".".join(("pkmlm", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in OWN}
    order = TopologicalSorter()
    for module, path in modules.items():
        tree = OWN[path]
        if room(path) == "memory" and path.stem.endswith("spec"):  # which loads its layer when it builds one
            tree = ast.Module([node for node in tree.body if isinstance(node, ast.ImportFrom)], [])
        for name in imports(tree):
            owner = name if name in modules else name.rpartition(".")[0]
            if owner in modules and owner != module:
                order.add(module, owner)
    order.prepare()  # raises CycleError, which names the circle


def loaded_by(program: str) -> set[str]:
    """The modules that a program loads in a new process."""
    program = f"import sys, {program}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True, timeout=PATIENCE).split())


def own_rooms(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("pkmlm.")}


def test_what_is_known_of_memories_is_known_without_torch():
    loaded = loaded_by("pkmlm.memory.registry")
    assert "pkmlm.memory.ngram.spec" in loaded
    assert own_rooms(loaded) == {"memory"}
    assert not loaded & (HEAVY | {"yaml"})


def test_a_tokenizer_is_loaded_without_recipes_or_runs():
    assert own_rooms(loaded_by("pkmlm.data.tokenizer")) == {"console", "data", "errors", "files"}


def test_a_model_that_is_not_compiled_loads_no_compiler():
    assert "torch._dynamo" not in loaded_by("pkmlm.train.run, pkmlm.evaluate.evaluation, pkmlm.evaluate.generate")


LIBRARY = ["UsageCounters", "RowAdam", "ProductKeyMemory", "FlatKeyMemory", "PEER", "HashLayer"]
LIBRARY += ["NGramMemory", "TokenMemory"]
COUNT_LOADED = """
import os, sys, torch, pkmlm
for name in sys.argv[1:]:
    if not os.fork():
        getattr(pkmlm, name)
        print(name, *sorted(module for module in sys.modules if module.split(".")[0] == "pkmlm"), flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_others_put_into_their_networks_stands_alone():
    said = subprocess.check_output([sys.executable, "-c", COUNT_LOADED, *LIBRARY], text=True, timeout=PATIENCE)
    loaded = {name: modules for name, *modules in map(str.split, said.splitlines())}
    assert list(loaded) == LIBRARY
    for name, modules in loaded.items():
        assert len(modules) <= 25, (name, modules)
        assert name == "UsageCounters" or own_rooms(modules) <= LIBRARY_ROOMS


def test_commands_import_heavy_packages_only_when_they_run():
    commands = {path: tree for path, tree in FILES.items() if room(path) == "cli"}
    assert commands
    for path, tree in commands.items():
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in imports(node):
                    assert name.split(".")[0] not in HEAVY, f"{path} imports {name} at the top"


def test_no_data_is_ever_run_as_code():
    runs = {"eval", "exec", "compile", "__import__", "os.system", "torch.load", "yaml.load"}
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in runs, f"{path} calls {called}"
                for keyword in node.keywords:
                    assert ast.unparse(keyword) not in {"shell=True", "weights_only=False", "allow_pickle=True"}, path
        assert not {"pickle", "marshal", "shelve"} & {name.split(".")[0] for name in imports(tree)}, path


# Calls that change files. One file makes them, so that whatever is written is whole or absent and can be made to fail.
CHANGES = {"replace", "rename", "renames", "link", "symlink", "unlink", "remove", "removedirs", "rmdir", "mkdir"}
CHANGES |= {"makedirs", "truncate", "ftruncate", "chmod"}
METHODS = {"mkdir", "unlink", "rmdir", "touch", "write_text", "write_bytes", "symlink_to", "hardlink_to", "chmod"}
WRITES = {
    ("runs/checkpoint.py", "save_file(tensors, path, metadata)"),  # into a folder that is not there yet
}


def changes(tree: ast.AST) -> list[str]:
    """The calls in a file that change files."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        base, _, method = called.rpartition(".")
        modes = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
        opens = called == "open" and any(set("wax+") & set(ast.literal_eval(mode)) for mode in modes)
        system = (base == "shutil" and method[:4] in {"rmtr", "move", "copy"}) or (base == "os" and method in CHANGES)
        if opens or system or (base and method in METHODS) or called == "save_file":
            found.append(ast.unparse(node))
    return found


def test_files_are_changed_in_one_place():
    for path, tree in OWN.items():
        inside = path.relative_to(PACKAGE).as_posix()
        if inside != "files.py":
            assert not [call for call in changes(tree) if (inside, call) not in WRITES], path


def test_every_way_to_change_a_file_is_noticed():
    for call in (
        "open(p, 'wb')",
        "open(p, mode='a')",
        "os.rename(a, b)",
        "shutil.rmtree(p)",
        "p.mkdir()",
        "p.unlink()",
    ):
        assert changes(ast.parse(call)) == [call]
    assert not changes(ast.parse("open(p)\nopen(p, 'rb')\ntext.replace(a, b)\nos.path.exists(p)\nitems.remove(x)"))


def test_every_file_and_public_name_says_what_it_is():
    for path, tree in FILES.items():
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                base_only = not node.body or isinstance(node.body[0], ast.AnnAssign | ast.Pass)
                assert ast.get_docstring(node) or base_only, f"{path}: {node.name}"
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                said = ast.get_docstring(node) or len(node.body) == 1  # a single statement says it itself
                assert said, f"{path}: {node.name}"


def test_no_test_waits_for_a_process_for_ever():
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"subprocess.run", "subprocess.check_output"}:
                assert {keyword.arg for keyword in node.keywords} & {"timeout", None}, f"{path}, line {node.lineno}"
