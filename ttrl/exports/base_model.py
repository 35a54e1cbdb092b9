"""Name the starting model of a run and its licence, as far as this machine knows them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache

from ttrl.ready_models import READY_MODELS

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)


@dataclass(frozen=True)
class Base:
    """The starting model, for readers elsewhere."""

    name: str
    """For people: never a path of this machine."""
    hub: str | None
    """Its name on the hub; None if unknown."""
    licence: str | None
    """As the hub writes it: "apache-2.0"."""


def base_of(model: str, given: str | None = None) -> Base:
    """Describe the model of a run's config. given: its name on the hub, from the user."""
    ready = READY_MODELS.get(model)
    if ready is not None and not Path(model).exists():
        licence = ready.licence.lower() if ready.hub else None
        return Base(given or ready.hub or model, given or ready.hub, licence)
    folder = Path(model)
    card: Mapping[str, Any] = {}
    hub = given
    if folder.is_dir():
        card = _card(folder / "README.md")
        named = card.get("base_model")
        if hub is None and isinstance(named, str):
            hub = named
    elif _HUB_NAME.fullmatch(model):
        hub = given or model
    if hub is not None and not card:
        cached = try_to_load_from_cache(hub, "README.md")
        card = _card(Path(cached)) if isinstance(cached, str) else {}
    licence = card.get("license")
    return Base(hub or folder.name, hub, licence if isinstance(licence, str) and licence else None)


def _card(path: Path) -> Mapping[str, Any]:
    """Return the front matter of a model card; empty without any."""
    try:
        found = _FRONT_MATTER.match(path.read_text(encoding="utf-8"))
        values = yaml.safe_load(found[1]) if found else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
