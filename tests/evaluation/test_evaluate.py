"""`ttrl eval` and `ttrl compare` against a server that counts letters, rightly but for what its
name says.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from support.chat_server import ChatHandler, threaded

from ttrl import Task, cli, compare, evaluate
from ttrl.errors import ConfigError, ServerError, UserError
from ttrl.evaluation.comparison import compare_seeds
from ttrl.evaluation.eval_results import EvalResult, SetResult
from ttrl.evaluation.evaluate import EvalConfig, _digest, checked_sets
from ttrl.evaluation.families import TaskSpec
from ttrl.intervals import difference_over_seeds, wilson
from ttrl.records import Sample, TaskResult
from ttrl.registries import FAMILIES
from ttrl.rollouts.results import TaskResults
from ttrl.server.serving import ServedModel, serving


class _Counter(ChatHandler):
    """Counts the letter asked for; the model "careless" is wrong where the word has an a. Words
    with q make the server fail, and those with z its reply is cut off."""

    models = ("careful", "careless")
    bodies: ClassVar[list[dict]] = []

    def reply(self, body: dict) -> tuple[str, str]:
        self.bodies.append({**body, "key": self.headers["Authorization"]})
        letter, word = re.findall(r"How many (\w) are in (\w+)", body["messages"][-1]["content"])[0]
        if "q" in word:
            return "no such word", "error"
        wrong = body["model"] == "careless" and "a" in word
        return str(word.count(letter) + wrong), "length" if "z" in word else "stop"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MY_KEY", "secret-key")
    _Counter.bodies.clear()
    with threaded(_Counter) as address:
        yield address


def asked(word: str, letter: str = "e") -> Task:
    right = word.count(letter)
    return Task(
        [{"role": "user", "content": f"How many {letter} are in {word}?"}],
        lambda choice: (
            float(choice.message.content == str(right)),
            {"exact": float(choice.message.content == str(right))},
        ),
        id=word,
    )


def test_an_evaluation_and_its_files(address: str, tmp_path: Path) -> None:
    words = ["tree", "banana", "leave", "plum", "apple", "quiz", "maze", "pear", "fig", "cherry"]
    result = evaluate(
        address,
        {"fruit": [asked(word) for word in words], "one": [asked("tree")]},
        name="careless",
        key_variable="MY_KEY",
        system_prompt="Count.",
        temperature=0.5,
        max_tokens=7,
        prices=(1.0, 10.0),
        output=tmp_path / "result.json",
        samples_file=tmp_path / "samples.jsonl",
        pbar=False,
    )
    fruit = result["fruit"]
    # Wrong: banana, leave, apple, maze, pear. quiz fails.
    assert (fruit.num_tasks, fruit.num_samples, fruit.num_failed, fruit.num_truncated) == (
        10,
        10,
        1,
        1,
    )
    assert fruit.accuracy.mean == pytest.approx(4 / 9) and (
        fruit.accuracy.low,
        fruit.accuracy.high,
    ) == wilson(4, 9)
    assert fruit.accuracy_if_failed_are_wrong == pytest.approx(0.4)
    assert fruit.metrics["exact"] == fruit.accuracy == fruit.reward
    assert (fruit.completion_tokens, fruit.spend) == (
        18,
        pytest.approx((90 * 1.0 + 18 * 10.0) / 1e6),
    )
    assert [row.scores for row in fruit.tasks[:3]] == [[1.0], [0.0], [0.0]]
    assert fruit.tasks[5].scores == [None]
    body = _Counter.bodies[0]
    assert (
        body["messages"][0] == {"role": "system", "content": "Count."}
        and body["key"] == "Bearer secret-key"
    )
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.5, 7, "careless")
    written = (tmp_path / "result.json").read_text()
    assert "secret" not in written and json.loads(written)["complete"] is True
    assert json.loads(written)["sets"]["fruit"]["accuracy"]["mean"] == fruit.accuracy.mean
    assert json.loads(written)["settings"]["params"]["temperature"] == 0.5
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in rows if row["set"] == "fruit"] == words
    table = result.table()
    assert "0.444" in table and "1 of 10 samples have no grade" in table and "no such word" in table
    assert "1 of 10 samples were cut off" in table
    silent = dataclasses.replace(fruit, failures={})
    said = dataclasses.replace(result, sets=(silent,)).table()
    assert "would make the accuracy 0.400): their grader gave no 'exact'" in said
    # Own tasks do not say what counts as right; their metric's name does.
    assert fruit.score == "exact" and list(fruit.metrics) == ["exact"]
    assert table.splitlines()[1].split()[:3] == ["fruit", "10", "exact"]


def test_a_metric_that_some_samples_lack_says_how_many_have_it() -> None:
    messages = [{"role": "user", "content": "?"}]
    samples = [
        Sample(task_id="a", sample=n, messages=messages, reward=0.5, metrics={"form": 1.0})
        for n in range(3)
    ]
    samples[0].metrics["right"] = 1.0
    results = TaskResults([TaskResult(task_id="a", messages=messages, samples=samples)])
    one = SetResult.of("mine", [Task(messages, len, id="a")], results, samples_per_task=3)
    assert one.partial_metrics == {"right": 1}
    (line,) = [
        line
        for line in EvalResult(model="m", settings={}, sets=[one]).table().splitlines()
        if "form" in line
    ]
    assert "right 1.000 (0.207 to 1.000; in 1 sample)" in line
    assert "(in " not in line[line.index("form") : line.index("right")]


def test_several_samples_and_pass_at_k(address: str) -> None:
    result = evaluate(
        address,
        {"x": [asked("tree"), asked("banana")]},
        name="careless",
        samples_per_task=4,
        pbar=False,
    )
    assert (
        result["x"].accuracy.mean == 0.5
        and result["x"].accuracy.method == "Wilson, tasks as clusters"
    )
    assert sorted(result["x"].pass_at) == [1, 2, 4] and result["x"].pass_at[4].mean == 0.5
    assert _Counter.bodies[0]["temperature"] == 1.0


def test_repeated_tasks_are_one_task_with_more_samples(address: str, tmp_path: Path) -> None:
    """A list that holds each question 32 times says no more of other questions than one of each."""
    words, often = ["tree", "banana", "plum"], ["tree", "banana", "plum"] * 32
    paths = {
        name: [tmp_path / f"{name}{count}.json" for count in (1, 32)]
        for name in ("careful", "careless")
    }
    for name, (few, many) in paths.items():
        once = evaluate(
            address, {"x": [asked(word) for word in words]}, name=name, output=few, pbar=False
        )
        repeated = evaluate(
            address, {"x": [asked(word) for word in often]}, name=name, output=many, pbar=False
        )
        one, other = once["x"], repeated["x"]
        assert (other.num_tasks, other.num_repeats, other.accuracy.num_tasks) == (96, 93, 3)
        assert other.accuracy.mean == pytest.approx(one.accuracy.mean)
        assert other.accuracy.high - other.accuracy.low > 0.9 * (
            one.accuracy.high - one.accuracy.low
        )
        assert other.metrics["exact"] == other.accuracy == other.reward
        assert "93 of 96 tasks repeat another" in repeated.table() and "repeat" not in once.table()
    few, many = (compare(*(files[place] for files in paths.values())).sets[0] for place in (0, 1))
    assert (few.num_shared, many.num_shared, many.num_others) == (3, 3, 0)
    assert few.difference.mean == pytest.approx(many.difference.mean) == pytest.approx(-1 / 3)
    assert many.difference.high - many.difference.low > 0.8 * (
        few.difference.high - few.difference.low
    )
    # Tasks that begin with the same words are others: rollouts, whose ids tell them apart.
    alike = [
        Task(
            [{"role": "user", "content": "How many e are in tree?"}],
            lambda choice: 1.0,
            id=f"game {i}",
        )
        for i in range(4)
    ]
    games = evaluate(address, {"x": alike}, pbar=False)["x"]
    assert (games.num_repeats, games.accuracy.num_tasks) == (0, 4)


def test_the_cache_goes_on_where_it_was(address: str, tmp_path: Path) -> None:
    tasks = [asked(word) for word in ("tree", "leave", "plum")]
    options = {"cache": tmp_path / "cache", "weights_digest": "w", "pbar": False}
    evaluate(address, {"x": tasks[:2]}, **options)
    before = len(_Counter.bodies)
    again = evaluate(address, {"x": tasks}, **options)
    assert len(_Counter.bodies) == before + 1
    assert (
        again["x"].num_cached == 2
        and again["x"].new_completion_tokens == 2
        and again["x"].completion_tokens == 6
    )


def test_the_commands(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "careful.json", tmp_path / "careless.json"
    common = ["--tasks", "letter-counting", "--n", "40", "--option", "letter_counting.max_length=6"]
    assert cli.main(["eval", address, "--model", "careful", *common, "--output", str(first)]) == 0
    assert re.search(
        r"letter_counting\s+40\s+exact\s+1\.000\s+0\.912 to 1\.000", capsys.readouterr().out
    )
    assert cli.main(["eval", address, "--model", "careless", *common, "--output", str(second)]) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(first), str(second)]) == 0
    with_a = sum(
        "a" in row["id"].split("/")[1]
        for row in json.loads(first.read_text())["sets"]["letter_counting"]["tasks"]
    )
    comparison = compare(first, second).sets[0]
    assert (comparison.difference.worse, comparison.difference.better) == (with_a, 0) and with_a > 5
    assert comparison.difference.mean == pytest.approx(-with_a / 40)
    assert f"0/{with_a}" in capsys.readouterr().out
    assert cli.main(["compare", str(first), str(second), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"][0]["num_shared"] == 40


TASKS_FILE = """
import ttrl

def grader(choice):
    return {returned}

tasks = [ttrl.Task([{{"role": "user", "content": "How many e are in tree?"}}], grader, id="tree")]
"""


def test_one_family_that_fails_entirely_hides_no_other(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither those before it nor those after it; the exit code says that something failed."""
    files = {"first": "1.0", "broken": "1 / 0", "last": "0.5"}
    for name, returned in files.items():
        (tmp_path / f"{name}.py").write_text(TASKS_FILE.format(returned=returned))
    asked = ",".join(f"{tmp_path}/{name}.py" for name in files)
    output = tmp_path / "result.json"
    assert cli.main(["eval", address, "--tasks", asked, "--output", str(output)]) == 2
    said = capsys.readouterr()
    assert re.search(r"first\.py\s+1\s+reward\s+1\.000", said.out)
    assert re.search(r"last\.py\s+1\s+reward\s+0\.500", said.out)
    assert re.search(
        r"error: .*broken\.py: all 1 samples of 1 tasks failed, .*ZeroDivisionError", said.err
    )
    written = json.loads(output.read_text())
    assert written["complete"] is True
    assert list(written["failed"]) == [f"{tmp_path}/broken.py"]


def test_a_server_that_answers_nothing_ends_the_evaluation_with_what_there_is(address: str) -> None:
    sets = {"first": [asked("tree")], "refused": [asked("quiz")], "last": [asked("tree")]}
    result = evaluate(address, sets, pbar=False)
    assert [one.name for one in result.sets] == ["first", "refused"]
    assert not result.complete
    assert "no such word" in result.failed["refused"]
    with pytest.raises(ServerError, match="all 1 samples of 1 tasks failed"):
        evaluate(address, {"refused": [asked("quiz")]}, pbar=False)


def test_comparisons_pair_what_was_asked_in_the_same_words(address: str, tmp_path: Path) -> None:
    paths = tmp_path / "a.json", tmp_path / "b.json"
    evaluate(
        address, {"x": [asked("tree"), asked("plum"), asked("plum")]}, output=paths[0], pbar=False
    )
    others = [
        asked("plum"),
        Task(
            [{"role": "user", "content": "Again: How many e are in tree?"}],
            asked("tree").grader,
            id="tree",
        ),
    ]
    evaluate(address, {"x": others, "y": others}, output=paths[1], name="careless", pbar=False)
    comparison = compare(*paths)
    assert (comparison.sets[0].num_shared, comparison.sets[0].num_others, comparison.left_out) == (
        1,
        3,
        ["y"],
    )
    with pytest.raises(UserError, match="cannot be read as an evaluation"):
        compare(tmp_path / "none.json", paths[1])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match="is not a result of ttrl eval"):
        compare(paths[0], tmp_path / "other.json")
    # The same family with its data elsewhere, a task without a grade, an evaluation that was
    # interrupted.
    first, second = (json.loads(path.read_text()) for path in paths)
    first["sets"] = {"data/x=here": first["sets"]["x"]}
    second["sets"] = {
        "x=there": {
            **second["sets"]["x"],
            "tasks": [dict(second["sets"]["x"]["tasks"][0], scores=[None])],
        }
    }
    second["complete"] = False
    for path, content in zip(paths, (first, second)):
        path.write_text(json.dumps(content))
    comparison = compare(*paths)
    assert (
        comparison.sets[0].num_shared,
        comparison.sets[0].num_ungraded,
        comparison.left_out,
    ) == (0, 1, [])
    assert (
        comparison.incomplete == ["second"]
        and "1 tasks are left out: they have no grade" in comparison.table()
    )
    assert comparison.models[1] == f"careless at {address}"
    with pytest.raises(UserError, match="confidence is 95"):
        compare(*paths, confidence=95)


def test_seeds_of_two_ways_to_train_are_compared_on_each_set(address: str, tmp_path: Path) -> None:
    """Against `difference_over_seeds` of the scores in plain lists."""
    words = ["banana", "plum", "pear", "fig", "apple", "cherry"]
    names = {"a0": "careful", "a1": "careless", "b0": "careless", "b1": "careless"}
    for name, model in names.items():
        some = words if name != "b1" else words[:-1]
        evaluate(
            address,
            {"x": [asked(word) for word in some]},
            output=tmp_path / name,
            name=model,
            pbar=False,
        )
    (found,) = compare_seeds([tmp_path / "a0", tmp_path / "a1"], [tmp_path / "b0", tmp_path / "b1"])
    scores = {"careful": [[1.0]] * 5, "careless": [[float("a" not in word)] for word in words[:-1]]}
    first, second = [scores["careful"], scores["careless"]], [scores["careless"]] * 2
    assert (
        found.difference == difference_over_seeds(first, second)
        and found.difference.method == "t over tasks and seeds"
    )
    assert (found.first, found.second) == (pytest.approx(0.7), pytest.approx(0.4))
    assert (found.num_shared, found.num_others, found.row()[:2]) == (5, 1, ["x", "5"])


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate(
            str(tmp_path / "nothing"),
            "gsm8k,mmlu=/nope,foo,letter_counting@test,nyt_connections,countdown=x,sort_letters,sort_letters",
            n=0,
            pass_at=[4],
            temperature=-1,
            confidence=95,
            name="x",
            prices=(1,),
            params={"tempreature": 1},
            options={"gsm8k.stlye": "r1", "arc_agi.x": 1},
        )
    said = "\n".join(caught.value.problems)
    for part in (
        "n is 0",
        "pass_at has [4]",
        "temperature is -1",
        "confidence is 95",
        "name is 'x', but names are for addresses",
        "prices is (1.0,)",
        "tempreature",
        "nothing does not exist",
        "gsm8k has no option 'stlye'; choose one of style",
        "/nope is neither a file",
        "no tasks are called 'foo'",
        "letter_counting has 'train', 'validation'",
        "nyt_connections needs data",
        "countdown is generated and reads no data",
        "sort_letters is listed twice",
        "option 'arc_agi.x' belongs to none of the families",
    ):
        assert part in said, part
    with pytest.raises(ConfigError, match="unknown key 'sample'"):
        evaluate("http://127.0.0.1:1/v1", "countdown", sample=3)


def test_what_would_be_found_too_late_is_found_before_a_request(
    address: str, tmp_path: Path
) -> None:
    """Keys in addresses, results that could not be written, a cache that could not be used."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        evaluate(
            address.replace("//", "//user:hunter2@") + "?key=hunter2",
            "letter_counting",
            n=1,
            output=tmp_path / "notes.txt",
            samples_file=tmp_path / "notes.txt",
            cache=tmp_path,
            dtype="float32",
        )
    said = "\n".join(caught.value.problems)
    assert "hunter2" not in said and (tmp_path / "notes.txt").read_text() == "mine"
    parts = (
        "has a name, a key",
        "that file is not an evaluation",
        "are both",
        "Set weights_digest",
        "dtype is for a local server",
    )
    for part in parts:
        assert part in said, part
    for file in (tmp_path, tmp_path / "notes.txt" / "result.json"):
        with pytest.raises(ConfigError, match=r"a folder; give a file name|cannot be made"):
            evaluate(address, "letter_counting", n=1, output=file)
    with pytest.raises(ConfigError, match="a cache cannot be at 'foo://x'"):
        evaluate(address, "letter_counting", n=1, cache="foo://x")
    with pytest.raises(ConfigError, match="http://localhost:8000/v1"):
        evaluate("localhost:8000/v1", "letter_counting", n=1)
    assert _Counter.bodies == []


def test_an_option_is_for_every_set_of_its_family(address: str) -> None:
    config = EvalConfig(
        model=address,
        tasks="letter_counting@train,letter_counting",
        n=20,
        options={"letter_counting.max_length": 4},
    )
    words = [task.id.split("/")[1] for one in checked_sets(config) for task in one.tasks]
    assert len(words) == 40 and max(map(len, words)) == 4


def test_the_cache_knows_what_changes_answers() -> None:
    """The length of the context cuts replies off, quantization changes them; on how many devices
    they are computed does not.
    """

    def digest(**settings: object) -> str | None:
        return _digest(EvalConfig(model="org/name", tasks="countdown", dtype="float32", **settings))

    plain = digest()
    assert digest(server_args={"tensor_parallel_size": 2}) == plain
    others = [
        digest(max_model_len=256),
        digest(max_model_len=512),
        digest(server_args={"quantization": "fp8"}),
    ]
    assert len({plain, *others}) == 4


def test_a_chat_template_is_for_servers_that_are_started_and_changes_the_cache_key(
    address: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="chat_template is for a local server"):
        evaluate(address, "countdown", n=1, chat_template=template, pbar=False)
    with pytest.raises(ConfigError, match="chat_template: line 1 is not valid Jinja"):
        evaluate(str(tiny_model), "countdown", n=1, chat_template="{% if messages %}", pbar=False)
    (tmp_path / "ours.jinja").write_text(template)
    asked_with: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def serving_here(model: str, **settings: object) -> Iterator[ServedModel]:
        with serving(address) as served:
            own = (Path(model) / "chat_template.jinja").read_text()
            digest = _digest(EvalConfig(model=model, tasks="countdown"))
            asked_with.append((own, str(digest)))
            yield served

    monkeypatch.setattr("ttrl.evaluation.evaluate.serving", serving_here)
    given = {"x": [asked("quiz")]}
    for settings in (
        {},
        {"chat_template": str(tmp_path / "ours.jinja")},
        {"chat_template": template},
    ):
        with contextlib.suppress(ServerError):
            evaluate(str(tiny_model), given, pbar=False, **settings)
    (own, plain), (from_file, first), (from_text, second) = asked_with
    assert own != template == from_file == from_text
    assert plain != first == second


def test_servers_that_do_not_answer_or_serve_another_model(address: str) -> None:
    with pytest.raises(ServerError, match="serves no model 'other'; it serves careful, careless"):
        evaluate(address, "countdown", n=1, name="other", pbar=False)
    with pytest.raises(ServerError, match="end in /v1"):
        evaluate("http://127.0.0.1:1/v1", "countdown", n=1, pbar=False)
    with pytest.raises(ServerError, match="no such word"):
        evaluate(address, {"x": [asked("quiz")]}, pbar=False)


def test_a_file_of_ones_own(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trees_of_mine.py").write_text(
        "from ttrl import Task\n"
        "def get_tasks(n):\n"
        "    message = {'role': 'user', 'content': 'How many e are in tree?'}\n"
        "    return [Task([message], lambda choice: 1.0, id=str(k)) for k in range(n)]\n"
    )
    result = evaluate(address, f"{tmp_path / 'trees_of_mine.py'}", n=3, pbar=False)
    assert result.sets[0].num_tasks == 3 and result.sets[0].accuracy.mean == 1.0


def test_the_table_of_families() -> None:
    """Every family is there, its function has what the table says, and those that are made can be
    asked for without data.
    """
    for name in FAMILIES.names():
        family = FAMILIES[name]
        assert FAMILIES.load(name, family.tasks).__name__.startswith("get_")
        # The others are not installed here.
        if family.data is None and (not family.example or name == "reasoning_gym"):
            tasks = TaskSpec.parse(f"{name}:{family.example}" if family.example else name).tasks(2)
            assert len(tasks) == 2
    assert str(TaskSpec.parse("arc-easy@train=some/where")) == "arc_easy@train=some/where"
    with pytest.raises(UserError, match=r"largest is 'many'; give a whole number from 10"):
        TaskSpec.parse("countdown").with_option("largest", "many").tasks(2)
    with pytest.raises(UserError, match="leave :small out"):
        TaskSpec.parse("countdown:small")


def test_a_file_of_a_family_is_none_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TTRL_INSPECT_AI_PYTHON", str(tmp_path / "python"))
    for name in ("inspect_ai:my_evals.py:sums", "inspect-ai:my_evals.py"):
        with pytest.raises(ConfigError, match=f"cannot start '{tmp_path}/python': No such file"):
            evaluate("http://127.0.0.1:9/v1", name, pbar=False)


def test_a_family_of_families() -> None:
    spec = TaskSpec.parse("reasoning-gym:chain_sum@train").with_option("max_terms", 2)
    assert str(spec) == "reasoning_gym:chain_sum@train"
    assert all(task.grader.entry["metadata"]["num_terms"] == 2 for task in spec.tasks(5))
    with pytest.raises(UserError, match="choose one, such as reasoning_gym:chain_sum"):
        TaskSpec.parse("reasoning_gym")
    with pytest.raises(UserError, match=r"no option 'max_term'; choose from .*max_terms"):
        spec.with_option("max_term", 2).tasks(5)
    with pytest.raises(UserError, match="no option 'name'"):
        spec.with_option("name", "gcd")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--params", "{"], "'{' is not JSON"),
        (["--params", "[1]"], """'[1]': give an object, such as {"seed": 1}"""),
        (["--chat-template-kwargs", "3"], "'3': give an object"),
        (["--pass-at", "1,x"], "'1,x': give whole numbers with commas, such as 1,8"),
        (["--prices", "0.15"], "'0.15': give two numbers with a comma, such as 0.15,0.60"),
    ],
)
def test_an_option_that_cannot_be_read_says_how_to_write_it(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["eval", "tiny", "--tasks", "letter-counting", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", ["gsm8k.style", "style=r1"])
def test_an_option_of_a_family_has_a_family_and_a_value(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "tiny", "--tasks", "gsm8k", "--option", option]) == 2
    assert f"--option '{option}': write FAMILY.NAME=VALUE" in capsys.readouterr().err


def test_options_of_the_command_reach_the_requests_and_the_families(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option in JSON is a number, and any other one is a word."""
    arguments = ["eval", address, "--tasks", "letter-counting", "--n", "2", "--samples", "2"]
    options = ["--params", '{"seed": 7}', "--pass-at", "1,2", "--prices", "0.5,1"]
    assert cli.main([*arguments, *options, "--output", str(tmp_path / "r.json")]) == 0
    assert {body["seed"] for body in _Counter.bodies} == {7}
    assert "$" in capsys.readouterr().out
    assert cli.main([*arguments, "--option", "letter_counting.max_length=long"]) == 2
    assert "min_length 3 and max_length 'long'" in capsys.readouterr().err


def test_runs_are_compared_without_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", str(tmp_path), str(tmp_path), "--json"]) == 2
    assert "--json is for evaluations; for runs, ttrl prints a table" in capsys.readouterr().err
