"""Compare an iteration trained again with the bits given to servers before.

After a kill, iterations without files are trained again (`save_every`). Their samples stay, so the
weights have to come out the same. Whenever a trainer holds weights out, the digest of each tensor
goes into the iteration's weights.json before any server learns of them, with the settings behind
the bits. With the same rows and settings, another digest is an error. With others, it is an error
once the training is marked as done. On GPUs it is a warning: sums may differ from run to run there.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from ttrl.errors import RunFolderError
from ttrl.run_folder.folder import IterationFolder
from ttrl.system.files import read_object, write_json

WEIGHTS_FILE = "weights.json"
_NO_BITS = {
    "model",
    "state",
    "packed",
    "output_dir",
    "sampler_model",
    "sampler_version",
    "reference_model",
    "lora_base",
    "save",
    "kept",
    "hand_over",
    "free_memory",
    "follow",
    "profile_steps",
    "measure_peak",
    "collective_timeout",
    "state_format",
}
"""Settings of the recipe without effect on bits: paths, and work besides training."""

logger = logging.getLogger(__name__)


def check_bits(
    iteration: IterationFolder,
    tensors: Mapping[str, str],
    recipe: Mapping[str, Any],
    processes: int,
) -> None:
    """Compare the digests of new weights, by tensor, with the recorded ones. Record them if there
    are none, or if an unfinished training has other settings now. Raises RunFolderError.
    """
    path = iteration.path / WEIGHTS_FILE
    of = {name: value for name, value in recipe.items() if name not in _NO_BITS}
    of["processes"] = processes
    of["rows"] = iteration.files("pack").get("packed.safetensors")
    of = json.loads(json.dumps(of))  # lists, as they will be read
    before = None
    changed = []
    if path.is_file():
        before = read_object(path)
        changed = _changed(before["of"], of)
    if before is None or (changed and not iteration.is_done("train")):
        write_json(path, {"of": of, "tensors": dict(tensors)})
        return
    names = before["tensors"].keys() | tensors.keys()
    wrong = sorted(name for name in names if before["tensors"].get(name) != tensors.get(name))
    if not wrong:
        return
    if changed:
        cause = f"since then, {'; '.join(changed)}"
    else:
        cause = (
            "rows and settings are the same, so the cause is another processor, another version "
            "of a library, damaged memory, or a damaged starting file"
        )
    message = (
        f"iteration {iteration.number} was trained again, and {len(wrong)} of {len(names)} tensors "
        f"differ from the servers' earlier ones, such as {wrong[0]}: {cause}"
    )
    if recipe.get("device") == "cuda":
        return logger.warning("%s; the run continues from these", message)
    raise RunFolderError(
        f"{message}. Fix the cause and start the same command again. To continue with these "
        f"weights, although other weights sampled later iterations, remove {path} and the "
        f"{WEIGHTS_FILE} of later iterations"
    )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = before.keys() | now.keys()
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(names)
        if before.get(name) != now.get(name)
    ]
