"""Settings for others to see (a report that is sent around, a tracking service): keys and passwords are left out of them.

config.yaml itself holds what the person wrote. Secrets belong in the environment; this is for those who put them elsewhere, as
in {"_component_": "torchtune.training.metric_logging.CometLogger", "api_key": …} or in {"extra_headers": {"Authorization": …}}
of `sampling`.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(r"(?i)(^|[-_.])(api-?key|key|token|secret|password|passwd|authorization|credentials?|cookie)$")
"""Of a setting's name: "hf_token", "X-Api-Key"; not "max_tokens", "key_file"."""


def without_secrets(values: Any, name: str = "") -> Any:
    """Plain values with HIDDEN in the place of each text whose name says that it is a secret."""
    if isinstance(values, Mapping):
        return {key: without_secrets(value, str(key)) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [without_secrets(value, name) for value in values]
    return HIDDEN if isinstance(values, str) and values and _SECRET.search(name) else values
