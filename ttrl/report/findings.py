"""The report's words on what stands out, each with samples that show it, and on sampler against trainer where they differ."""

import json
from typing import Any

from ttrl.monitoring.finding import Finding
from ttrl.monitoring.findings import findings
from ttrl.report.conversations import answer_html, messages_html, pager, token_html
from ttrl.report.markup import section, text_html
from ttrl.report.samples import TokenTable, examples, token_text_of
from ttrl.run_folder.folder import DRIFT_FILE as FILE_NAME
from ttrl.run_folder.reader import RunData

_WORDS = {"stop": "going on is of no use", "warn": "learning suffers", "note": "worth knowing"}


def findings_section(run: RunData) -> str:
    """What stands out, the gravest first; "" where nothing does."""
    found = findings(run.rows, run.config)
    if not found:
        return ""
    items = "".join(_item(run, number, finding) for number, finding in enumerate(found))
    return f'<section class="notices"><h2>What stands out</h2><ul class="findings">{items}</ul></section>'


def _item(run: RunData, number: int, finding: Finding) -> str:
    shown = _examples(run, f"f{number}", finding) if finding.examples is not None else ""
    return (
        f'<li class="{finding.severity}"><b>{text_html(finding.title)}</b> <span class="badge">{_WORDS[finding.severity]}</span>'
        f"<p>{text_html(finding.advice)}</p>{shown}</li>"
    )


def _examples(run: RunData, name: str, finding: Finding) -> str:
    """Samples that show it, of the newest iteration that has any."""
    assert finding.examples is not None
    for number in run.numbers_with("rollouts.jsonl")[:-6:-1]:
        folder = run.iteration_folder(number)
        samples = examples(folder / "rollouts.jsonl", finding.examples)
        if not samples:
            continue
        table = TokenTable(folder)
        text = token_text_of(run, number)
        pages = [
            (
                f"iteration {number} · {text_html(one.task_id)} · sample {one.sample}",
                messages_html(one.messages) + answer_html(one, "assistant", token_html(one, table, text)),
            )
            for one in samples
        ]
        return f"<details><summary>Examples ({len(pages)})</summary>{pager(name, pages)}</details>"
    return ""


def drift_section(run: RunData) -> str:
    """The newest drift.json: numbers, tokens and causes; "" where the run was always within its limits."""
    reports = sorted((run.folder / "iterations").glob(f"[0-9]*/{FILE_NAME}"))
    if not reports:
        return ""
    try:
        report = json.loads(reports[-1].read_text(encoding="utf-8"))
        return _drift(report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # of another version, or damaged


def _drift(report: dict[str, Any]) -> str:
    def value(number: float | None) -> str:
        return "not finite" if number is None else f"{number:.4f}"

    tokens = "".join(
        f"<tr><th>{text_html(one['task_id'])} · {one['sample']}</th><td>{one['place']}</td>"
        f'<td class="context">{text_html(one["before"])}<b>{text_html(one["text"])}</b>{text_html(one["after"])}</td>'
        f"<td>{value(one['sampler'])}</td><td>{value(one['trainer'])}</td></tr>"
        for one in report["worst"]
    )
    causes = "".join(
        f'<li class="{cause["verdict"].split()[0]}"><b>{text_html(cause["name"])}</b> '
        f'<span class="badge">{text_html(cause["verdict"])}</span>'
        f"<p>{text_html(cause['detail'])}"
        + (f" → {text_html(cause['way_out'])}" if cause["way_out"] and cause["verdict"] != "ruled out" else "")
        + "</p></li>"
        for cause in report["causes"]
    )
    table = (
        '<div class="wide"><table><thead><tr><th>task · sample</th><th>token</th><th class="left">where</th><th>sampler</th>'
        f"<th>trainer</th></tr></thead><tbody>{tokens}</tbody></table></div>"
        if tokens
        else ""
    )
    lead = (
        f"Iteration {report['iteration']}, tokens of policy {report['version']}: {'; '.join(report['exceeded'])}. The tokens "
        "that are furthest apart, and the likely causes, checked:"
    )
    return section("Sampler and trainer disagree", f'{table}<ul class="causes">{causes}</ul>', text_html(lead))
