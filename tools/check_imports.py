"""Who may import whom: the house's table as data, and a check of every file against it. `python tools/check_imports.py [ROOT]`

Data flows one way (tasks → rollouts → data → file → recipe → file → server), and a process loads only what it needs: one that
only samples never loads torch, a recipe never loads openai or vllm. Both follow from which file may name which package: that is
checked, over the syntax tree of every file in ttrl/. Imports inside functions count like any other; only
`if TYPE_CHECKING:` blocks do not, because they never run. Reported as `file:line: what`:

- a room that imports a room or a third-party package outside its line of the table, or that has no line;
- cycles between files, lazy imports included;
- third-party packages that pyproject.toml does not declare;
- files of more than 400 lines, and anything in recipes/ that could be mistaken for a package or a library.

Exit status 1 when there is anything to report.
"""

import argparse
import ast
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINES = 400


@dataclass(frozen=True)
class Room:
    """A line of the table. Rooms in EVERYWHERE may be imported by all, and are not repeated."""

    rooms: frozenset[str]
    packages: frozenset[str]
    """Third-party packages, by the name of their top-level module."""


def _room(rooms: str = "", packages: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(packages.split()))


EVERYWHERE = frozenset({"errors", "files", "processes"})

HOUSE = {
    "errors": _room(),
    "files": _room("", "safetensors"),  # its error class alone; safetensors itself loads no torch
    "processes": _room("process_guard", "psutil"),
    "request_folder": _room(),
    "process_guard": _room(),
    "native_code": _room(),
    "records": _room(),
    "configs": _room(),
    "tasks": _room("records", "chess datasets pyarrow"),
    # Everything that talks to a server: no torch, and nothing that imports torch (transformers, safetensors.torch).
    "rollouts": _room("tasks records process_guard", "openai obstore tqdm aiohttp httpx msgspec cloudpickle numpy"),
    "server": _room("records", "openai psutil httpx"),
    # Loaded by vLLM into its own processes, and by nothing else.
    "vllm_worker": _room("vllm_shared_prompts", "torch vllm"),
    "vllm_shared_prompts": _room("", "torch vllm numpy"),
    "data": _room("records", "torch transformers tokenizers safetensors numpy jinja2 matplotlib"),
    "costs": _room("records"),
    "training": _room(
        "data costs records configs request_folder native_code",
        "torch torchtune torchao transformers safetensors numpy huggingface_hub omegaconf",
    ),
    "grpo_recipe": _room("training data instruments records configs", "torch torchtune transformers omegaconf"),
    "sft_recipe": _room("training data instruments records configs", "torch torchtune transformers omegaconf"),
    "instruments": _room("data training records", "torch numpy"),
    "loop": _room(
        "tasks rollouts server data costs evaluation records configs request_folder process_guard tiny_model native_code",
        "torch transformers tokenizers huggingface_hub openai obstore yaml tqdm numpy psutil wandb",
    ),
    "evaluation": _room("tasks rollouts records", "openai tqdm numpy"),
    "tiny_model": _room("", "torch transformers tokenizers"),
    "doctor": _room("native_code", "psutil"),
    "cli": _room("doctor loop evaluation tasks rollouts server data costs records configs"),
}

DISTRIBUTIONS = {"yaml": "pyyaml"}  # where the module's name is not the project's


@dataclass(frozen=True)
class Import:
    """One import statement's target. `name` is dotted; `names` is what `from name import ...` takes."""

    line: int
    name: str
    names: tuple[str, ...] = ()


def module_name(path: Path, root: Path) -> str:
    """ttrl/data/packing/pack.py → "ttrl.data.packing.pack"; a package's __init__.py → the package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(tree: ast.AST, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import that can run, wherever it stands: statements, `import_module("...")` and `__import__("...")`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for branch in node.orelse:
                yield from imports_of(ast.Module([branch], []), module, is_package=is_package)
            continue
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                name = ".".join([*package[: len(package) - node.level + 1], *([name] if name else [])])
            yield Import(node.lineno, name, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.lineno, node.args[0].value)
        yield from imports_of(node, module, is_package=is_package)


class Checker:
    """Holds the tree's modules; `problems()` lists everything that breaks the rules, as "file:line: what"."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {module_name(path, root): path for path in sorted((root / "ttrl").rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.files.items()}
        self.declared = self._declared()
        self.public = self._public()

    def _declared(self) -> set[str]:
        """Projects that pyproject.toml names, dev tools left out."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        optional = [text for extra, texts in project.get("optional-dependencies", {}).items() if extra != "dev" for text in texts]
        names = [re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0] for text in [*project.get("dependencies", []), *optional]]
        return {re.sub(r"[-_.]+", "-", name).lower() for name in names}

    def _public(self) -> set[str]:
        """The names that ttrl/__init__.py loads lazily from elsewhere."""
        for node in ast.walk(self.trees.get("ttrl", ast.Module([], []))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == "_HOME":
                return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        return set()

    def targets(self, found: Import) -> list[str]:
        """The modules of ours that an import loads: `from ttrl.data import masks` is ttrl.data.packing.masks when that is a
        file."""
        if found.name.split(".")[0] != "ttrl":
            return []
        submodules = [f"{found.name}.{name}" for name in found.names if f"{found.name}.{name}" in self.files]
        return submodules if submodules and len(submodules) == len(found.names) else [found.name, *submodules]

    def problems(self) -> list[str]:
        """Everything that breaks the rules, in order of files and lines."""
        problems: list[str] = []
        edges: dict[str, dict[str, int]] = {}
        for module, path in self.files.items():
            where = path.relative_to(self.root)
            for found in imports_of(self.trees[module], module, is_package=path.name == "__init__.py"):
                problems += [f"{where}:{found.line}: {problem}" for problem in self._check(module, found)]
                for target in self.targets(found):
                    if target in self.files:
                        edges.setdefault(module, {}).setdefault(target, found.line)
            problems += self._check_length(path)
        return problems + self._cycles(edges) + self._check_recipes()

    def _check_length(self, path: Path) -> list[str]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        return [f"{path.relative_to(self.root)}:{lines}: {lines} lines; {MAX_LINES} at the most"] if lines > MAX_LINES else []

    def _check(self, module: str, found: Import) -> list[str]:
        """What is wrong with one import."""
        parts = module.split(".")
        if len(parts) == 1:
            outside = found.name.split(".")[0] not in sys.stdlib_module_names
            return [f"ttrl/__init__.py imports {found.name}; importing ttrl must cost nothing"] if outside else []
        room, top = parts[1], found.name.split(".")[0]
        if room not in HOUSE:
            return [f"ttrl.{room} has no line in the table of tools/check_imports.py"]
        rule = HOUSE[room]
        if top == "ttrl":
            if found.name == "ttrl" and (hidden := self.public.intersection(found.names)):
                return [f"takes {', '.join(sorted(hidden))} from ttrl; inside the package, import from the file that defines it"]
            rooms = {target.split(".")[1] for target in self.targets(found) if "." in target}
            allowed = rule.rooms | {room} | (EVERYWHERE if room not in EVERYWHERE else {"errors"})
            return [f"{room} must not import {other}" for other in sorted(rooms - allowed)]
        if top in sys.stdlib_module_names:
            return []
        if top not in rule.packages:
            return [f"{room} must not import {top}"]
        if DISTRIBUTIONS.get(top, top.replace("_", "-").lower()) not in self.declared:
            return [f"imports {top}, which pyproject.toml does not declare"]
        return []

    def _cycles(self, edges: dict[str, dict[str, int]]) -> list[str]:
        """One report per cycle found in a depth-first walk over files."""
        problems, state = [], dict.fromkeys(self.files, "new")

        def walk(module: str, path: list[str]) -> None:
            state[module] = "open"
            for target, line in edges.get(module, {}).items():
                if state[target] == "open":
                    cycle = [*path[path.index(target) :], target]
                    problems.append(f"{self.files[module].relative_to(self.root)}:{line}: import cycle {' → '.join(cycle)}")
                elif state[target] == "new":
                    walk(target, [*path, target])
            state[module] = "done"

        for module in self.files:
            if state[module] == "new":
                walk(module, [module])
        return problems

    def _check_recipes(self) -> list[str]:
        """recipes/ is run by path: its folder comes first on sys.path, so its files must not hide libraries."""
        problems = []
        for path in sorted((self.root / "recipes").rglob("*.py")):
            where = f"{path.relative_to(self.root)}:1"
            if path.name == "__init__.py":
                problems.append(f"{where}: recipes/ must not be a package (torchtune ships a top-level one of that name)")
            elif path.stem in sys.stdlib_module_names or importlib.util.find_spec(path.stem) is not None:
                problems.append(f"{where}: hides the library {path.stem} for every script in its folder")
        return problems


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent
    parser.add_argument("root", nargs="?", type=Path, default=default, help="the folder that holds ttrl/ and pyproject.toml")
    problems = Checker(parser.parse_args().root).problems()
    print("\n".join(problems) if problems else "check_imports: the house is in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
