"""Show samples: the found ones, one token by token, and packed rows."""

from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from ttrl.errors import UserError
from ttrl.monitoring.followed_runs import Runs, stamp_of
from ttrl.report.conversations import sample_pages
from ttrl.report.samples import TRAINER_FILE
from ttrl.report.view import FILE_NAME, FIRST_ROWS, open_pack
from ttrl.run_folder.reader import RunData
from ttrl.ui.pages import NotFoundError, View, page, run_named, stamp_of_all
from ttrl.ui.search import (
    FILES,
    Kind,
    Place,
    Query,
    Search,
    place_named,
    sample_at,
    search,
    task_lines,
)


def samples_page(runs: Runs, name: str, query: QueryParams) -> View:
    """Filter samples."""
    run = run_named(runs, name)
    data = run.data()
    kind: Kind = "held out" if query.get("of") == "held out" else "training"
    first, last, problem = _iterations(data, kind, query.get("iterations", ""))
    asked = Query(
        kind,
        first,
        last,
        " ".join(query.getlist("where")),
        query.get("text", ""),
        query.get("finish", ""),
    )
    against = query.get("against", "")
    stamps = [run.stamp(), stamp_of(data.iteration_folder(last) / FILES[kind])]
    other = None
    if against:
        followed = run_named(runs, against)
        other = followed.data()
        stamps.append(followed.stamp())

    stamp = stamp_of_all([stamps, str(query), len(runs.all())])

    def render() -> str:
        result = Search()
        error = problem
        try:
            result = search(data, asked, other)
        except UserError as found:
            error = str(found)
        again = ""
        if result.stopped_at is not None:
            iterations = f"{first}-{result.stopped_at}"
            rest = [pair for pair in query.multi_items() if pair[0] != "iterations"]
            again = "?" + urlencode([*rest, ("iterations", iterations)])
        return page(
            "samples.html",
            stamp,
            run=name,
            others=[one.name for one in runs.all() if one.name != name],
            asked=asked,
            against=against,
            where=asked.conditions,
            iterations=query.get("iterations", ""),
            searched=(first, last),
            metrics=sorted({key for row in data.rows[-3:] for key in row.metrics or {}}),
            result=result,
            error=error,
            again=again,
        )

    return View(stamp, render)


def sample_page(runs: Runs, name: str, where: str, query: QueryParams) -> View:
    """Show a conversation token by token, with the other samples of its task."""
    run = run_named(runs, name)
    data = run.data()
    place = place_named(where)
    sample = None if place is None else sample_at(data, place)
    if place is None or sample is None:
        raise NotFoundError(f"{name} has no sample {where}")
    found = sample
    folder = data.iteration_folder(place.iteration)
    names = (FILES[place.kind], FILE_NAME, TRAINER_FILE)

    stamp = stamp_of_all([stamp_of(folder / one) for one in names])

    def render() -> str:
        group = task_lines(data, place, found.task_id)
        return page(
            "sample.html",
            stamp,
            run=name,
            place=place,
            sample=found,
            page=sample_pages(data, place.iteration, [found])[0],
            group=group,
            before=_neighbour(data, place, -1),
            after=_neighbour(data, place, 1),
        )

    return View(stamp, render)


def rows_page(runs: Runs, name: str, number_: int, query: QueryParams) -> View:
    """Frame the packed rows of an iteration."""
    data = run_named(runs, name).data()
    path = data.iteration_folder(number_) / FILE_NAME
    if not path.is_file():
        raise NotFoundError(f"iteration {number_} of {name} has no packed rows")
    rows = query.get("rows", f"0-{FIRST_ROWS - 1}")
    stamp = stamp_of_all([stamp_of(path), rows])
    return View(stamp, lambda: page("rows.html", stamp, run=name, number=number_, rows=rows))


def pack_page(runs: Runs, name: str, number_: int, query: QueryParams) -> View:
    """Show packed rows, as `ttrl view` writes them. Raises PackError, RunFolderError, UserError."""
    data = run_named(runs, name).data()
    path = data.iteration_folder(number_) / FILE_NAME
    rows = query.get("rows")

    def render() -> str:
        wanted = rows
        if wanted == f"0-{FIRST_ROWS - 1}":
            wanted = None  # the pack may be smaller
        return open_pack(data.folder, number_, wanted).html()

    return View(stamp_of_all([stamp_of(path), rows]), render)


def _iterations(run: RunData, kind: Kind, text: str) -> tuple[int, int, str]:
    """Return the first and last iteration to search, by default the newest with samples, and the
    problem of an unreadable text.
    """
    there = run.numbers_with(FILES[kind])
    newest = there[-1] if there else 0
    if text.strip() == "all":
        return (there[0] if there else 0), newest, ""
    if not text.strip():
        return newest, newest, ""
    first, dash, last = (part.strip() for part in text.partition("-"))
    last = last if dash else first
    if not all(part.isascii() and part.isdecimal() and len(part) < 7 for part in (first, last)):
        problem = f"{text!r} is no range of iterations; write 7, 3-7 or all"
        return newest, newest, problem
    return int(first), min(int(last), max(newest, int(first))), ""


def _neighbour(run: RunData, place: Place, step: int) -> Place | None:
    near = Place(place.kind, place.iteration, place.line + step)
    if near.line < 0 or sample_at(run, near) is None:
        return None
    return near
