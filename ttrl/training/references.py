"""Name the reference model of a pack's stored log-probabilities, and check it against a config."""

import hashlib
from pathlib import Path

from ttrl.configs import GRPOConfig
from ttrl.data.packing.pack import PackedTensors
from ttrl.errors import ConfigError, ModelFolderError, PackError
from ttrl.system.files import digest
from ttrl.training.models.weights import files_of

# Of PackedTensors.metadata.
MODEL_KEY = "reference_model"
WEIGHTS_KEY = "reference_weights"
TEMPERATURE_KEY = "reference_temperature"


def model_digest(folder: str | Path) -> str:
    """Return the SHA-256 over config.json and the weight files; about a second per GB. Raises
    ModelFolderError.
    """
    if not Path(folder, "config.json").is_file():
        raise ModelFolderError(
            f"{folder} has no config.json; reference_model must be a model folder in Hugging "
            "Face layout"
        )
    total = hashlib.sha256()
    for name in ["config.json", *sorted(files_of(Path(folder)))]:
        total.update(f"{name}\0{digest(Path(folder, name))}\n".encode())
    return total.hexdigest()


def reference_facts(config: GRPOConfig) -> dict[str, str]:
    return {
        MODEL_KEY: config.model,
        WEIGHTS_KEY: model_digest(config.model),
        TEMPERATURE_KEY: repr(float(config.temperature)),
    }


def check_reference(packed: PackedTensors, config: GRPOConfig) -> None:
    """Check the objective's reference before loading anything. Packs without a recorded source of
    their log-probabilities are trusted.

    Raises PackError if the pack's log-probabilities are of another temperature, or of other weights
    than a given `reference_model`'s; ConfigError if there is neither a reference model nor stored
    log-probabilities.
    """
    if not config.needs_estimates:
        return
    if packed.reference_logprobs is None:
        if not config.has_reference:
            problem = (
                f"kl_coefficient is above 0 but reference_model is missing, and {config.packed} "
                "holds no reference log-probabilities; give one, or store them (python -m "
                "ttrl.training.prepass)"
            )
            raise ConfigError("config", [problem])
        return
    model, weights, temperature = (
        packed.metadata.get(key) for key in (MODEL_KEY, WEIGHTS_KEY, TEMPERATURE_KEY)
    )
    again = (
        "store them again (python -m ttrl.training.prepass --reference MODEL --temperature "
        f"{config.temperature})"
    )
    if temperature is not None and temperature != repr(float(config.temperature)):
        raise PackError(
            f"the reference log-probabilities in {config.packed} are of temperature "
            f"{temperature}, and temperature is "
            f"{config.temperature}; {again}"
        )
    if weights is None or config.reference_model is None:
        return
    wanted = model_digest(config.reference_model)
    if weights != wanted:
        raise PackError(
            f"the reference log-probabilities in {config.packed} are of {model} (weights "
            f"{weights[:12]}), and reference_model is "
            f"{config.reference_model} (weights {wanted[:12]}); {again}, or leave "
            "reference_model out"
        )
