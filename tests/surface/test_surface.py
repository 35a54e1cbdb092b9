"""What scripts depend on stays as it is, or CHANGELOG says why not: names, settings, commands,
files, errors.

`python tests/surface/describe.py` writes the golden files again; the test of a run writes
run_folder.txt where it is missing. Wording is free.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.world import World
from surface import describe

import ttrl
from ttrl import GRPOConfig, PackedTensors, Task, TrainConfig, cli, errors, replay
from ttrl.evaluation.evaluate import evaluate
from ttrl.run_folder.folder import RunFolder

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("file", describe.FILES)
def test_the_golden_file(file: str) -> None:
    expected = (describe.FOLDER / file).read_text(encoding="utf-8").splitlines()
    assert list(describe.FILES[file]()) == expected, (
        "on purpose? python tests/surface/describe.py, and a line in CHANGELOG"
    )


def start(folder: Path, **settings: Any) -> Any:
    values: dict[str, Any] = {
        "run": str(folder / "run"),
        "model": "tiny",
        "iterations": 1,
        "tasks_per_iteration": 1,
    }
    return ttrl.train(
        TrainConfig(**values | settings), [Task(MESSAGES, lambda choice: 1.0)] * 2, quiet=True
    )


def damaged(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_text('{"iteration": 1}\nnonsense\n{"iteration": 3}\n')
    return folder


BAD_INPUT: dict[str, tuple[type[errors.TtrlError], Callable[[Path], Any]]] = {
    "an unknown setting": (
        errors.ConfigError,
        lambda folder: TrainConfig.parse({"rnu": "x"}, "file"),
    ),
    "a setting of another type": (
        errors.ConfigError,
        lambda folder: start(folder, iterations="many"),
    ),
    "settings that exclude each other": (
        errors.ConfigError,
        lambda folder: start(folder, save_every=0),
    ),
    "an unknown setting of the recipe": (
        errors.ConfigError,
        lambda folder: start(folder, training={"lrr": 1.0}),
    ),
    "a recipe without a model": (errors.ConfigError, lambda folder: GRPOConfig.parse({}, "file")),
    "no such model": (
        errors.ModelFolderError,
        lambda folder: start(folder, model=str(folder / "nothing")),
    ),
    "a folder that is no model": (
        errors.ModelFolderError,
        lambda folder: start(folder, model=str(folder)),
    ),
    "a task without messages": (errors.TaskError, lambda folder: Task([], lambda choice: 1.0)),
    "a grader that is none": (errors.TaskError, lambda folder: Task(MESSAGES, "right")),  # type: ignore[arg-type]
    "a pack that is none": (
        errors.PackError,
        lambda folder: PackedTensors.load(folder / "nothing.safetensors"),
    ),
    "a run that is none": (
        errors.RunFolderError,
        lambda folder: replay(folder / "nothing", grader=lambda choice: 1.0),
    ),
    "damaged metrics": (errors.RunFolderError, lambda folder: RunFolder(damaged(folder)).metrics()),
    "a family that is none": (errors.ConfigError, lambda folder: evaluate("tiny", "gsm9k")),
}
"""What is wrong → the class of its error, and how it is given."""


@pytest.mark.parametrize("what", BAD_INPUT)
def test_the_class_of_an_error(what: str, tmp_path: Path) -> None:
    kind, give = BAD_INPUT[what]
    with pytest.raises(errors.TtrlError) as caught:
        give(tmp_path)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["--version"], 0),
        (["report", "nothing"], 2),
        (["no such command"], 2),
        (["plan", "nothing.yaml"], 2),
        (["models"], 0),
        (["config", "max_tokens"], 0),
        (["config", "no_such_setting"], 2),
        (["train", "nothing.py"], 2),
        (["compare", "nothing", "other"], 2),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0: done, 2: what was given is wrong, 130: interrupted (tests/cli/test_doctor.py)."""
    monkeypatch.chdir(tmp_path)
    try:
        found = cli.main(arguments)
    except SystemExit as stopped:
        found = stopped.code  # type: ignore[assignment]
    assert found == code


OF_OTHERS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "environment.json",
)
"""Files whose keys are those of a model, or of this machine."""


def files_of(run: Path) -> Iterator[str]:
    """Yield the files of a run folder, each with the keys of its JSON."""
    for path in sorted(run.rglob("*")):
        if not path.is_file() or "/owners/" in str(path):
            continue
        yield str(path.relative_to(run))
        if path.suffix not in (".json", ".jsonl") or path.name in OF_OTHERS:
            continue
        text = path.read_text(encoding="utf-8")
        rows = (
            [json.loads(line) for line in text.splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(text)]
        )
        keys = {key for row in rows for key in describe.keys_of(row)}
        # As often as there was time.
        yield from sorted(f"    {key}" for key in keys if not key.startswith("machine."))


def test_the_files_of_a_run(world: World) -> None:
    """Server and trainer are made up (tests/support/world.py); the loop and its files are real."""
    world.writes_reports = True
    world.train(iterations=1)
    golden = describe.FOLDER / "run_folder.txt"
    found = "\n".join(files_of(world.run)) + "\n"
    if not golden.exists():
        golden.write_text(found, encoding="utf-8")
        pytest.fail(f"{golden} is new: read it, commit it, and add a line to CHANGELOG")
    assert found == golden.read_text(encoding="utf-8"), f"on purpose? remove {golden} and run this"
