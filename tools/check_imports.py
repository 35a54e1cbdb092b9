"""Who may import whom: the table as data, and a check of every file against it. `python
tools/check_imports.py [ROOT]`

Data flows one way (tasks → rollouts → data → file → recipe → file → server), and a process loads
only what it needs: one that only samples never loads torch, a recipe never loads openai or vllm.
Both follow from which file may name which package, which is checked in the syntax tree of every
file in ttrl/. Imports inside functions count like any other. A room is a folder; a folder inside it
is a separate room with its own line. Reported as `file:line: what`:

- a room that imports a room or a third-party package outside its line of the table, or that has no
  line;
- import cycles between files or rooms, including imports inside functions and under `if
  TYPE_CHECKING:`;
- third-party packages that pyproject.toml does not declare;
- files of more than 5,000 tokens of code, files under 40 lines that are not named in SMALL_FILES,
  rooms of more than 20 files;
- dotted names such as `ttrl.data.masks` in strings and in the docs that do not exist;
- anything in recipes/ that could be mistaken for a package or a library.

Exit status 1 if there is anything to report. `--rooms` prints files and lines of each room instead.
"""

import argparse
import ast
import importlib.util
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

MAX_TOKENS = 5_000
MIN_LINES = 40
MAX_FILES = 20

SMALL_FILES = {
    # A file under MIN_LINES is a noun of its own: what it is, in a word.
    "ttrl/version.py": "the version",
    "ttrl/training/kernels/doubles.py": "float64",
}


def count_tokens(source: str) -> int:
    """Count names, operators, numbers and strings, however they are laid out."""
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in kinds for token in tokens)


@dataclass(frozen=True)
class Room:
    """A line of the table. Rooms in EVERYWHERE may be imported by all, and are not repeated."""

    rooms: frozenset[str]
    packages: frozenset[str]
    """Third-party packages, by the name of their top-level module."""


def _room(rooms: str = "", packages: str = "") -> Room:
    return Room(frozenset(rooms.split()), frozenset(packages.split()))


EVERYWHERE = frozenset({"errors", "messages", "text", "version", "system"})

HOUSE = {
    # What every room may import.
    "errors": _room("text"),
    "messages": _room("text"),
    "text": _room(),
    "version": _room(),
    "intervals": _room(),
    # Safetensors' error class alone: it loads no torch.
    "system": _room("text", "safetensors obstore tqdm psutil pynvml pandas"),
    # What passes between rooms, and what is known without running anything.
    "records": _room(),
    "tiny_model": _room("", "torch transformers tokenizers"),
    "nanochat": _room("", "torch transformers"),
    "ready_models": _room("tiny_model", "torch transformers"),
    "configs": _room("", "yaml"),
    "costs": _room("configs"),
    "tasks": _room("tasks.numerals records", "chess datasets pyarrow openai"),
    "tasks.numerals": _room(),
    "tasks.temporal_clue": _room("tasks records"),
    "tasks.zebra_grid": _room("tasks records"),
    "tasks.humaneval": _room("tasks records"),
    "tasks.math": _room("tasks tasks.numerals records", "math_verify latex2sympy2_extended sympy"),
    # Loaded by vLLM into its own processes, and by nothing else.
    "vllm_worker": _room("nanochat", "torch vllm numpy transformers"),
    # Everything that talks to a server: no torch, and nothing that imports torch (transformers,
    # safetensors.torch).
    "rollouts": _room(
        "rollouts.client rollouts.scheduling rollouts.cache rollouts.graders tasks records",
        "openai tqdm numpy",
    ),
    "rollouts.client": _room("records", "openai aiohttp msgspec"),
    "rollouts.scheduling": _room("rollouts.client", "numpy"),
    "rollouts.cache": _room("rollouts.client", "obstore msgspec"),
    "rollouts.graders": _room("rollouts.client tasks", "openai cloudpickle"),
    "server": _room("data.chat configs costs records", "openai psutil huggingface_hub"),
    # From samples to rows.
    "data": _room("data.chat configs records", "numpy"),
    "data.chat": _room("records", "jinja2 markupsafe"),
    "data.packing": _room("configs records", "torch safetensors numpy"),
    "data.pictures": _room("data.packing", "numpy matplotlib jinja2 markupsafe"),
    # The recipes and their parts: neither openai nor vllm.
    "training": _room(
        "training.kernels training.models training.objective training.optimizer "
        "training.parallel training.policy "
        "data.packing costs configs records",
        "torch torchao transformers tokenizers safetensors omegaconf",
    ),
    "training.kernels": _room("data.packing", "torch triton"),
    "training.parallel": _room("configs", "torch omegaconf"),
    "training.objective": _room("data data.packing configs", "torch numpy"),
    "training.models": _room(
        "training.kernels nanochat", "torch torchtune transformers safetensors huggingface_hub"
    ),
    "training.policy": _room(
        "training.models training.kernels training.parallel configs records",
        "torch torchtune torchao safetensors",
    ),
    "training.optimizer": _room(
        "training.policy training.models training.parallel configs", "torch torchao safetensors"
    ),
    "grpo_recipe": _room(
        "instruments training training.objective training.parallel data.packing configs",
        "torchtune omegaconf",
    ),
    "sft_recipe": _room(
        "training training.kernels training.models training.objective training.parallel "
        "training.policy data.chat data.packing "
        "configs records",
        "torch torchtune transformers omegaconf",
    ),
    "instruments": _room(
        "training training.kernels training.objective training.optimizer training.parallel "
        "training.policy data data.packing "
        "tiny_model configs records intervals",
        "torch numpy omegaconf tokenizers matplotlib safetensors",
    ),
    # A run: its folder, what is seen of it, what it will take, its processes, its phases.
    "run_folder": _room("configs intervals instruments", "yaml obstore tokenizers"),
    "monitoring": _room("run_folder data.packing configs", "torch wandb yaml"),
    "plans": _room(
        "run_folder costs data.chat data.packing training.models server tasks ready_models "
        "configs records",
        "torch transformers huggingface_hub numpy psutil",
    ),
    "report": _room(
        "monitoring plans run_folder data.packing data.pictures configs records intervals",
        "jinja2 markupsafe",
    ),
    "launch": _room("run_folder server configs records", "torch psutil tqdm yaml"),
    # The only one that loads Ray.
    "cluster": _room("launch run_folder server rollouts data configs records", "ray transformers"),
    "loop": _room(
        "cluster launch monitoring plans report run_folder rollouts rollouts.client "
        "rollouts.cache rollouts.graders "
        "rollouts.scheduling data data.chat data.packing server tasks ready_models tiny_model "
        "costs configs records intervals",
        "torch transformers huggingface_hub numpy psutil pynvml",
    ),
    "judges": _room("tasks", "openai"),
    "agents": _room(
        "run_folder rollouts rollouts.client rollouts.graders tasks records",
        "aiohttp anyio httpx2 inspect_ai mcp reasoning_gym textarena verifiers",
    ),
    "evaluation": _room(
        "intervals agents rollouts rollouts.cache rollouts.client server tasks ready_models "
        "configs records",
        "openai tqdm numpy",
    ),
    "replays": _room(
        "loop launch report run_folder rollouts rollouts.client rollouts.graders data server "
        "tasks configs records",
        "numpy tqdm yaml",
    ),
    "cli": _room(
        "agents instruments evaluation replays loop launch plans report run_folder rollouts "
        "rollouts.cache server tasks "
        "nanochat training.models tasks.temporal_clue tasks.zebra_grid ready_models tiny_model "
        "configs records",
        "openai tqdm yaml",
    ),
}

# Of another environment: ttrl.agents.worker, which is run by path, imports them.
ELSEWHERE = {"inspect_ai", "verifiers"}
# Where the module's name is not the project's.
DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}

NAMED_IN = (
    "ttrl/**/*.py",
    "tests/**/*.py",
    "tools/*.py",
    "recipes/*.py",
    "docs/**/*.md",
    "README.md",
    "*.toml",
    "Makefile",
)
NOT_OURS = {"end", "written"}  # attributes of a variable that a template calls ttrl
MADE_UP = {"test_house.py", "test_public_names.py"}  # which name what is not there
_DOTTED = re.compile(r"(?<![\w./-])ttrl(?:\.[A-Za-z_]\w*)+")
_FROM = re.compile(r"\bfrom (ttrl(?:\.\w+)*) import \(?(\w+(?:(?: as \w+)?, \w+)*)")
_PATH = re.compile(r"(?<![\w./-])ttrl/[\w/]+\.(?:py|c|css|html|txt)\b")

Edges: TypeAlias = dict[str, dict[str, str]]
"""From each name to what it imports, with the "file:line" of the first such import."""


@dataclass(frozen=True)
class Import:
    """One import statement's target. `name` is dotted; `names` is what `from name import ...`
    takes.
    """

    line: int
    name: str
    names: tuple[str, ...] = ()
    for_types: bool = False
    """Below `if TYPE_CHECKING:`: it never runs."""


def module_name(path: Path, root: Path) -> str:
    """ttrl/data/packing/pack.py → "ttrl.data.packing.pack"; a package's __init__.py → the
    package.
    """
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(
    tree: ast.AST, module: str, *, is_package: bool = False, for_types: bool = False
) -> Iterator[Import]:
    """Every import, wherever it stands: statements, `import_module("...")` and
    `__import__("...")`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from imports_of(
                ast.Module(node.body, []), module, is_package=is_package, for_types=True
            )
            yield from imports_of(
                ast.Module(node.orelse, []), module, is_package=is_package, for_types=for_types
            )
            continue
        if isinstance(node, ast.Import):
            yield from (
                Import(node.lineno, alias.name, for_types=for_types) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                name = ".".join(
                    [*package[: len(package) - node.level + 1], *([name] if name else [])]
                )
            yield Import(node.lineno, name, tuple(alias.name for alias in node.names), for_types)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Import(node.lineno, node.args[0].value, for_types=for_types)
        yield from imports_of(node, module, is_package=is_package, for_types=for_types)


class Checker:
    """Holds the tree's modules; `problems()` lists everything that breaks the rules, as "file:line:
    what".
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {
            module_name(path, root): path for path in sorted((root / "ttrl").rglob("*.py"))
        }
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.files.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self._names = {name: set(re.findall(r"\w+", text)) for name, text in self.texts.items()}
        self.rooms = {name.rpartition(".")[0] for name in self.files}
        self.declared = self._declared()
        self.public = self._public()

    def _declared(self) -> set[str]:
        """Projects that pyproject.toml names, dev tools left out."""
        project = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]
        optional = [
            text
            for extra, texts in project.get("optional-dependencies", {}).items()
            if extra != "dev"
            for text in texts
        ]
        names = [
            re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0]
            for text in [*project.get("dependencies", []), *optional]
        ]
        return {re.sub(r"[-_.]+", "-", name).lower() for name in names}

    def _public(self) -> set[str]:
        """The names that ttrl/__init__.py loads lazily from elsewhere."""
        for node in ast.walk(self.trees.get("ttrl", ast.Module([], []))):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Dict)
                and ast.unparse(node.targets[0]) == "_HOME"
            ):
                return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        return set()

    def room(self, module: str) -> str:
        """Return a module's folder without "ttrl.", such as "data.packing"; a file of ttrl/ itself
        is a room of its own.
        """
        parts = self.files[module].relative_to(self.root).with_suffix("").parts[1:]
        return parts[0] if len(parts) == 1 else ".".join(parts[:-1])

    def targets(self, found: Import) -> list[str]:
        """The modules of ours that an import loads: `from ttrl.data import advantages` is
        ttrl.data.advantages where that is a file, and ttrl.data where it is a name."""
        if found.name.split(".")[0] != "ttrl":
            return []
        submodules = [
            f"{found.name}.{name}" for name in found.names if f"{found.name}.{name}" in self.files
        ]
        return (
            submodules
            if submodules and len(submodules) == len(found.names)
            else [found.name, *submodules]
        )

    def problems(self) -> list[str]:
        """Everything that breaks the rules, in order of files and lines."""
        problems: list[str] = []
        files: Edges = {}
        rooms: Edges = {}
        for module, path in self.files.items():
            where = path.relative_to(self.root)
            for found in imports_of(
                self.trees[module], module, is_package=path.name == "__init__.py"
            ):
                problems += [
                    f"{where}:{found.line}: {problem}" for problem in self._check(module, found)
                ]
                if module == "ttrl":
                    continue  # loads its names lazily, from everywhere
                for target in filter(self.files.__contains__, self.targets(found)):
                    files.setdefault(module, {}).setdefault(target, f"{where}:{found.line}")
                    if self.room(module) != self.room(target) and target != "ttrl":
                        rooms.setdefault(self.room(module), {}).setdefault(
                            self.room(target), f"{where}:{found.line}"
                        )
            problems += self._check_length(path)
        return [
            *problems,
            *circles(files, "import circle"),
            *circles(rooms, "circle of rooms"),
            *self._check_rooms(),
            *self._check_names(),
            *self._check_recipes(),
        ]

    def _check_length(self, path: Path) -> list[str]:
        where = path.relative_to(self.root)
        source = path.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        tokens = count_tokens(source)
        if tokens > MAX_TOKENS:
            return [f"{where}:{lines}: {tokens:,} tokens of code; {MAX_TOKENS:,} at the most"]
        if (
            lines < MIN_LINES
            and not path.name.startswith("__")
            and where.as_posix() not in SMALL_FILES
        ):
            return [
                f"{where}:{lines}: {lines} lines; at least {MIN_LINES}, or a line in "
                "SMALL_FILES: which noun is it?"
            ]
        return []

    def files_of_rooms(self) -> dict[str, list[Path]]:
        """The Python files of each folder, by its name: "ttrl", "ttrl/data"."""
        found: dict[str, list[Path]] = {}
        for path in self.files.values():
            found.setdefault(path.parent.relative_to(self.root).as_posix(), []).append(path)
        return found

    def _check_rooms(self) -> list[str]:
        return [
            f"{folder}:1: {len(paths)} files; {MAX_FILES} at the most: which two ideas live here?"
            for folder, paths in self.files_of_rooms().items()
            if len(paths) > MAX_FILES
        ]

    def _check(self, module: str, found: Import) -> list[str]:
        """What is wrong with one import."""
        top = found.name.split(".")[0]
        if module == "ttrl":
            outside = (
                top not in sys.stdlib_module_names
                and found.name != "ttrl.version"
                and not found.for_types
            )
            return (
                [f"ttrl/__init__.py imports {found.name}; importing ttrl must cost nothing"]
                if outside
                else []
            )
        room = self.room(module)
        if room not in HOUSE:
            return [f"ttrl.{room} has no line in the table of tools/check_imports.py"]
        rule = HOUSE[room]
        if top == "ttrl":
            if found.name == "ttrl" and (hidden := self.public.intersection(found.names)):
                return [
                    f"takes {', '.join(sorted(hidden))} from ttrl; inside the package, import "
                    "from the file that defines it"
                ]
            rooms = {
                self.room(target)
                for target in self.targets(found)
                if target in self.files and target != "ttrl"
            }
            allowed = rule.rooms | {room} | (EVERYWHERE if room not in EVERYWHERE else {"errors"})
            return [f"{room} must not import {other}" for other in sorted(rooms - allowed)]
        if top in sys.stdlib_module_names or found.for_types:
            return []  # types alone never load a package
        if top not in rule.packages:
            return [f"{room} must not import {top}"]
        if (
            top not in ELSEWHERE
            and DISTRIBUTIONS.get(top, top.replace("_", "-").lower()) not in self.declared
        ):
            return [f"imports {top}, which pyproject.toml does not declare"]
        return []

    def _check_names(self) -> list[str]:
        """Dotted names of ours, wherever they stand: in docstrings, comments, strings, tests, tools
        and docs.
        """
        problems = []
        for path in sorted(
            path
            for pattern in NAMED_IN
            for path in self.root.glob(pattern)
            if path.name not in MADE_UP
        ):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                where = f"{path.relative_to(self.root)}:{number}"
                problems += [
                    f"{where}: there is no {name}"
                    for name in _DOTTED.findall(line)
                    if not self._leads_somewhere(name)
                ]
                problems += [
                    f"{where}: there is no {name}"
                    for name in _PATH.findall(line)
                    if not (self.root / name).exists()
                ]
                if path.is_relative_to(self.root / "ttrl"):
                    # Imports that are not there fail by themselves, but not those in strings that
                    # tests hand to others.
                    continue
                imported = [
                    (home, name.split(" ")[0])
                    for home, names in _FROM.findall(line)
                    for name in names.split(", ")
                ]
                problems += [
                    f"{where}: there is no {home}.{name}"
                    for home, name in imported
                    if not self._has(home, name)
                ]
        return problems

    def _leads_somewhere(self, name: str) -> bool:
        """Tell whether a dotted name is a module, or something that the text of a module names."""
        parts = name.split(".")
        for length in range(len(parts), 1, -1):
            if (module := ".".join(parts[:length])) in self.files:
                rest = parts[length:]
                return not rest or rest[0] in self._names[module]
        return (
            name in self.rooms
            or parts[1] in self.public
            or parts[1].startswith("_")
            or parts[1] in NOT_OURS
        )

    def _has(self, home: str, name: str) -> bool:
        """Tell whether `from home import name` finds something, be it code in a string that another
        process is to run.
        """
        return f"{home}.{name}" in self.files or self._leads_somewhere(f"{home}.{name}")

    def _check_recipes(self) -> list[str]:
        """recipes/ is run by path: its folder comes first on sys.path, so its files must not hide
        libraries.
        """
        problems = []
        for path in sorted((self.root / "recipes").rglob("*.py")):
            where = f"{path.relative_to(self.root)}:1"
            if path.name == "__init__.py":
                problems.append(
                    f"{where}: recipes/ must not be a package (torchtune ships a top-level one "
                    "of that name)"
                )
            elif (
                path.stem in sys.stdlib_module_names
                or importlib.util.find_spec(path.stem) is not None
            ):
                problems.append(
                    f"{where}: hides the library {path.stem} for every script in its folder"
                )
        return problems

    def table(self) -> str:
        """Files and lines of each room."""
        rows = [
            (
                folder,
                len(paths),
                sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths),
            )
            for folder, paths in sorted(self.files_of_rooms().items())
        ]
        rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
        return "\n".join(f"{folder:28}{files:6}{lines:8,}" for folder, files, lines in rows)


def circles(edges: Edges, what: str) -> list[str]:
    """One report per circle found in a depth-first walk; an edge knows the place that made it."""
    problems = []
    state = dict.fromkeys(
        [*edges, *(target for targets in edges.values() for target in targets)], "new"
    )

    def walk(name: str, path: list[str]) -> None:
        state[name] = "open"
        for target, place in edges.get(name, {}).items():
            if state[target] == "open":
                problems.append(
                    f"{place}: {what} {' → '.join([*path[path.index(target) :], target])}"
                )
            elif state[target] == "new":
                walk(target, [*path, target])
        state[name] = "done"

    for name in list(state):
        if state[name] == "new":
            walk(name, [name])
    return problems


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent
    parser.add_argument(
        "root",
        nargs="?",
        type=Path,
        default=default,
        help="the folder that holds ttrl/ and pyproject.toml",
    )
    parser.add_argument("--rooms", action="store_true", help="print files and lines of each room")
    arguments = parser.parse_args()
    checker = Checker(arguments.root)
    if arguments.rooms:
        print(checker.table())
        return 0
    problems = checker.problems()
    print("\n".join(problems) if problems else "check_imports: the house is in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
