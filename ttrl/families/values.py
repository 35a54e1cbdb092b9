"""Read the numbers in a config.json under any family's names."""

from collections.abc import Mapping
from typing import Any

from ttrl.errors import ModelFolderError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names for the number of experts."""
_OLDER_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}


def model_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a config.json's text part, under the names of today: GPT-2 has older
    ones.
    """
    text = config.get("text_config") or config
    return {**text, **{name: text[older] for older, name in _OLDER_NAMES.items() if older in text}}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is that of a mixture of experts."""
    return any(model_settings(config).get(name) for name in EXPERTS)


class Values:
    """The values of a config.json, under several names and with a class's defaults."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first value present; null counts as absent."""
        found = (self.config[name] for name in names if self.config.get(name) is not None)
        return next(found, default)

    def says(self, trait: bool | str) -> bool:
        """Return a trait, or the value of the setting it names."""
        if isinstance(trait, str):
            return bool(self.get(trait))
        return trait

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number. Raises ModelFolderError if there is none."""
        value = self.get(*names, default=default)
        if isinstance(value, list | tuple) and value and len(set(value)) == 1:
            value = value[0]  # one for each layer, all alike
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = f"counting parameters needs a whole number of at least {least}"
            raise ModelFolderError(f"config.json: {' or '.join(names)} is {value!r}; {wanted}")
        return value

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return self.number("num_hidden_layers", least=1)

    @property
    def width(self) -> int:
        """Return D."""
        return self.number("hidden_size", least=1)

    @property
    def heads(self) -> int:
        """Return H."""
        return self.number("num_attention_heads", least=1)

    @property
    def key_value_heads(self) -> int:
        """Return K."""
        return self.number("num_key_value_heads", default=self.heads, least=1)

    @property
    def head_dim(self) -> int:
        """Return E."""
        return self.number("head_dim", default=self.width // self.heads, least=1)

    @property
    def activation(self) -> str:
        """Return the name of the feed-forward layer's activation."""
        return str(self.get("hidden_activation", "hidden_act", default="silu"))
