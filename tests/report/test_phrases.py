"""The report in a few lines for a terminal, and the command that prints it."""

import json

from ttrl.cli import main
from ttrl.report.page import report_body
from ttrl.report.phrases import report_text, table_columns
from ttrl.run_folder.reader import read_run


def write_run(folder, rows):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows(wrong):
    groups = {"total": 10, "all_wrong": wrong, "kept": 10 - wrong}
    seconds = {"total": 2.0}
    training = [
        {"iteration": n, "reward": 0.2 * n, "trained": True, "groups": groups, "seconds": seconds}
        for n in (1, 2)
    ]
    return [
        {"iteration": 0, "validation_reward": 0.25},
        *training,
        {"iteration": 3, "validation_reward": 0.75},
    ]


def test_summary_figures_and_what_stands_out_fit_the_terminal(tmp_path):
    write_run(tmp_path / "run", rows(9))
    text = report_text(tmp_path / "run", width=60)
    assert all(len(line) <= 60 for line in text.splitlines())
    assert (
        text.startswith("Held-out reward rose from 0.25 to 0.75 in 3 iterations")
        and "Iterations" in text
    )
    assert " ! In 90% of the groups, every sample was wrong" in text


def test_the_headline_of_a_reward_names_what_is_solved(tmp_path):
    ends = [
        {"iteration": n, "validation_reward": 0.2 + 0.2 * n, "trained": bool(n)} for n in (0, 1, 2)
    ]
    write_run(
        tmp_path / "run",
        [{**row, "validation": {"right": 0.0, "words": 12.5 * n}} for n, row in enumerate(ends, 1)],
    )
    assert "from 0.2 to 0.6 in 2 iterations. Also held out: right 0% → 0%." in report_text(
        tmp_path / "run"
    )


def test_a_run_in_which_nothing_stands_out_says_so(tmp_path):
    write_run(tmp_path / "run", rows(0))
    assert report_text(tmp_path / "run").endswith("Nothing stands out.")


def test_the_path_alone_goes_to_standard_output(tmp_path, capsys):
    write_run(tmp_path / "run", rows(9))
    assert main(["report", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == str(tmp_path / "run" / "report.html")
    assert "What stands out" in captured.err


def test_a_folder_that_is_no_run_is_an_error_in_a_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_what_a_run_says_writes_no_escapes_to_the_terminal(tmp_path, capsys):
    """Names in it are those of whoever wrote the run folder."""
    named = {"look \x1b]0;title\x07here": 0.5}
    write_run(tmp_path / "run", [{**row, "validation": named} for row in rows(0)])
    assert main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "here" in said and "\x1b" not in said and "\x07" not in said


def test_a_run_that_is_validated_on_what_it_is_trained_on_says_so(tmp_path):
    write_run(tmp_path / "run", rows(0))
    same = {"digest": "1", "count": 4}
    (tmp_path / "run" / "tasks.json").write_text(
        json.dumps({"tasks": same, "validation_tasks": same})
    )
    text = report_text(tmp_path / "run")
    assert (
        text.startswith("Reward on the training tasks rose from 0.25 to 0.75")
        and "Held-out" not in text
    )
    run = read_run(tmp_path / "run")
    headings = [heading for heading, _ in table_columns(run, [0])]
    assert "reward on the training tasks" in headings
    assert "held-out" not in report_body(run)
