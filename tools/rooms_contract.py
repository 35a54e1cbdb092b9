"""A contract of import-linter: a room imports only the rooms and packages of its line.

A room is a folder of ttrl/, without the folders inside it, or a file of ttrl/ itself. The table in
pyproject.toml has a line for each.
"""

import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.domain.contract import InvalidContractOptions

ROOT = "ttrl"


class TableField(fields.Field[dict[str, set[str]]]):
    """Holds the names of rooms and packages by room."""

    def parse(self, raw_data: object) -> dict[str, set[str]]:
        table = cast(dict[str, list[str]], raw_data)
        return {room: set(names) for room, names in table.items()}


def room_of(module: str, graph: ImportGraph) -> str:
    """Return the room of a module, such as "data.packing" of ttrl.data.packing.pack."""
    name = module.removeprefix(f"{ROOT}.")
    if "." not in name or graph.find_children(module):
        return name
    return name.rpartition(".")[0]


class RoomsContract(Contract):
    """Compares every import with the table."""

    table = TableField()
    everywhere = fields.SetField(subfield=fields.StringField())
    """Rooms for all others to import."""

    def validate(self) -> None:
        """Refuse a table with a cycle."""
        try:
            TopologicalSorter(self.table).prepare()
        except CycleError as error:
            cycle = " → ".join(reversed(error.args[1]))
            raise InvalidContractOptions({"table": f"cycle of rooms {cycle}"}) from None

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """List the imports without a place in the table."""
        problems = list(self._problems(graph))
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print a line for each problem."""
        for problem in check.metadata["problems"]:
            output.print_error(problem, bold=False)
        output.new_line()

    def _problems(self, graph: ImportGraph) -> Iterator[str]:
        for importer in sorted(graph.modules):
            if graph.is_module_squashed(importer):
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                problem = self._problem(importer, imported, graph)
                if problem:
                    details = graph.get_import_details(importer=importer, imported=imported)
                    lines = ", ".join(str(detail["line_number"]) for detail in details)
                    yield f"{importer} -> {imported} (l.{lines}): {problem}"

    def _problem(self, importer: str, imported: str, graph: ImportGraph) -> str:
        """Say why an import is wrong, or return an empty text."""
        if imported == ROOT:
            return "import public names from the file that defines them"
        if imported in sys.stdlib_module_names:
            return ""
        if importer == ROOT:  # its names lie everywhere; tests/test_house.py sees what it loads
            return "" if imported.startswith(f"{ROOT}.") else "importing ttrl must cost nothing"
        if importer.startswith(f"{imported}.") and graph.chain_exists(imported, importer):
            return "a cycle through the package of this file"
        room = room_of(importer, graph)
        if room not in self.table:
            return f"{room} has no line in the table of pyproject.toml"
        target = imported
        allowed = {room} | self.table[room]
        if imported.startswith(f"{ROOT}."):
            target = room_of(imported, graph)
            allowed |= set() if room in self.everywhere else self.everywhere
        return "" if target in allowed else f"{room} must not import {target}"
