"""Check arguments of vLLM and of requests before its start: it takes 20 s to refuse one.

Reads the source of the installed vLLM, without importing it (5 s): the options of its parser, and
type, values and bounds of the fields behind them. Unclear cases are left to vLLM: nothing valid is
refused.
"""

import ast
import difflib
import functools
import importlib.util
import json
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrl.families.table import family_of
from ttrl.families.values import has_experts

_ENGINE = "engine/arg_utils.py"
_FRONTEND = "entrypoints/launchers/cli_args.py"
"""The place of the server's own options."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values of its `max_lora_rank`."""
_OTHER_DISTRIBUTIONS = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "min_tokens", "bad_words", "allowed_token_ids", "structured_outputs",
    "response_format",
)  # fmt: skip
"""Sampling parameters with another distribution than the trainer's softmax(logits /
temperature).
"""
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
"""Names of bounds in pydantic, and of their comparisons in `operator`, in words."""


def sampling_problems(sampling: Mapping[str, Any]) -> list[str]:
    """Return the parameters of `TrainConfig.sampling` set elsewhere, or with an effect on the
    distribution, one line each.
    """
    own = ("n", "temperature", "max_tokens", "logprobs", "model", "messages")
    found = [
        f"sampling: {name!r} has a setting of its own, or is set by ttrl; remove it"
        for name in own
        if name in sampling
    ]
    extra_body = sampling.get("extra_body")
    names = (*sampling, *(extra_body if isinstance(extra_body, dict) else ()))
    other = [name for name in names if name in _OTHER_DISTRIBUTIONS]
    return found + [
        f"sampling: {name!r} changes the sampled distribution, but training needs the same one; "
        "remove it"
        for name in other
    ]


def lora_rank_there(model: str | Path, rank: int) -> int:
    """Return vLLM's rank for an adapter: three times ours in the family with q, k and v in one
    matrix, as its adapter is three of ours side by side. A model not here yet may be of it.
    """
    config = _config(model)
    own = family_of(config).own
    if not config:
        return 3 * rank
    return rank * own.fused if own is not None else rank


def takes_adapters(model: str | Path, device: str) -> bool:
    """Tell whether vLLM serves adapters of a model: not of GPT-2, and on CPUs not of mixtures of
    experts.
    """
    config = _config(model)
    return family_of(config).vllm_adapters and not (device == "cpu" and has_experts(config))


def _config(model: str | Path) -> Mapping[str, Any]:
    """Return the content of a model's config.json; empty if it is not here."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return {}
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def argument_problems(given: Mapping[str, Any], root: Path | None = None) -> list[str]:
    """Return vLLM's objections to {"max_num_seqs": 8, …}, one line each; [] if no vLLM is
    installed.

    root: vLLM's folder; None: that of the one installed.
    """
    root = root or _installed()
    if root is None or not given or not _fields(root):
        return []
    known = _fields(root)
    found = []
    for name, value in given.items():
        option = name.replace("-", "_")
        plain = option.partition(".")[0].removeprefix("no_")
        if plain in known:
            found += [
                f"{name} is {value!r}; vLLM wants {wanted}"
                for wanted in _wanted(root, known[plain], value)
                if plain == option
            ]
        # Its parser takes beginnings of names.
        elif not any(one.startswith(plain) for one in known):
            near = difflib.get_close_matches(plain, known, n=1)
            found.append(
                f"vLLM has no argument {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return found


def is_argument(name: str) -> bool:
    """Return whether the installed vLLM has an argument of exactly this name."""
    root = _installed()
    return root is not None and name in _fields(root)


def lacks_argument(name: str) -> bool:
    """Return whether the installed vLLM lacks an argument of this name."""
    root = _installed()
    known = _fields(root) if root is not None else {}
    return bool(known) and name not in known


def _installed() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    return None


@dataclass(frozen=True)
class _Field:
    """The field behind an option in a config class of vLLM; None if the parser does not take it
    from one.
    """

    owner: str | None = None
    name: str = ""


@functools.cache
def _fields(root: Path) -> dict[str, _Field]:
    """Return every option of the server by its name with underscores; {} for a vLLM with other
    source code.
    """
    engine = _tree(root / _ENGINE)
    frontend = _tree(root / _FRONTEND)
    if engine is None or frontend is None:
        return {}
    options: dict[str, _Field] = {}
    for tree in (engine, frontend):
        classes: dict[str, str] = {}  # names of variables, and the class of their fields
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and (owner := _owner(node.value))
            ):
                classes[node.targets[0].id] = owner
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                for name in (one.value for one in node.args if isinstance(one, ast.Constant)):
                    if isinstance(name, str) and name.startswith("--"):
                        options[name[2:].replace("-", "_")] = _source(node, classes)
    for node in frontend.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            options |= {name: _Field() for name, _, _ in _annotated(node)}
    if len(options) > 100:
        return options
    return {}


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None


def _owner(value: ast.expr) -> str | None:
    """Return X of `get_kwargs(X)`."""
    match value:
        case ast.Call(func=ast.Name(id="get_kwargs"), args=[ast.Name(id=owner)]):
            return owner
    return None


def _source(call: ast.Call, classes: Mapping[str, str]) -> _Field:
    """Return the field of `add_argument("--x", **model_kwargs["x"])`, even with a replaced
    default.
    """
    match [one for one in call.keywords if one.arg != "dest"]:
        case [
            ast.keyword(
                arg=None,
                value=ast.Subscript(value=ast.Name(id=held), slice=ast.Constant(value=str(name))),
            )
        ] | [
            ast.keyword(
                arg=None,
                value=ast.Dict(
                    keys=[None, ast.Constant(value="default")],
                    values=[
                        ast.Subscript(value=ast.Name(id=held), slice=ast.Constant(value=str(name))),
                        _,
                    ],
                ),
            )
        ] if held in classes:
            return _Field(classes[held], name)
    return _Field()


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, one.annotation, one.value


@functools.cache
def _definition(
    root: Path, field: _Field
) -> tuple[frozenset[str], tuple[str, ...], dict[str, float]]:
    """Return the types of a field as names, the values of a Literal, and its bounds; nothing if it
    is not plain.
    """
    for path in sorted((root / "config").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if field.owner is None or not re.search(rf"^class {field.owner}\b", text, re.MULTILINE):
            continue
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == field.owner:
                for name, annotation, value in _annotated(node):
                    if name == field.name:
                        return *_types(annotation, tree), _bounds(value)
    return frozenset(), (), {}


def _types(annotation: ast.expr, tree: ast.Module) -> tuple[frozenset[str], tuple[str, ...]]:
    match annotation:
        case ast.BinOp(left=left, right=right, op=ast.BitOr()):
            (first, some), (second, more) = _types(left, tree), _types(right, tree)
            return first | second, some + more
        case ast.Constant(value=None):
            return frozenset({"None"}), ()
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            listed = [values]
            if isinstance(values, ast.Tuple):
                listed = values.elts
            texts = [
                one.value
                for one in listed
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            return frozenset({"Literal" if len(texts) == len(listed) else "?"}), tuple(texts)
        case ast.Name(id="int" | "float" | "bool" | "str" as plain):
            return frozenset({plain}), ()
        case ast.Name(id=alias):
            for node in tree.body:
                match node:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == alias:
                        return _types(value, tree)
                    case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if (
                        name == alias
                    ):
                        return _types(value, tree)
    return frozenset({"?"}), ()


def _bounds(value: ast.expr | None) -> dict[str, float]:
    """Return the bounds of `Field(default, gt=0, le=1)`."""
    if not isinstance(value, ast.Call):
        return {}
    return {
        one.arg: one.value.value
        for one in value.keywords
        if one.arg in _BOUNDS
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, int | float)
    }


def _wanted(root: Path, field: _Field, value: Any) -> list[str]:
    """Return vLLM's expectation for a value; [] if it may take it."""
    kinds, listed, bounds = _definition(root, field)
    kinds -= {"None"}
    if value is None or len(kinds) != 1:
        return []
    [kind] = kinds
    if kind == "bool":
        if isinstance(value, bool):
            return []
        return ["true or false"]
    if kind == "Literal":
        same = {text.lower().replace("-", "_") for text in listed}
        if str(value).lower().replace("-", "_") in same:
            return []
        return ["one of " + ", ".join(map(repr, listed))]
    if kind not in ("int", "float"):
        return []
    number = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (kind == "float" or float(value).is_integer())
    )
    if not number:  # "8k" and "auto" are numbers to it
        in_words = isinstance(value, str) and (
            re.search(r"\d|inf|nan", value) or value in ("auto", "", "None")
        )
        if in_words:
            return []
        return ["a whole number" if kind == "int" else "a number"]
    return [
        f"a number {_BOUNDS[name]} {limit:g}"
        for name, limit in bounds.items()
        if not getattr(operator, name)(value, limit)
    ]
