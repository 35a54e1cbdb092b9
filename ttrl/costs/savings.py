"""Which setting of the recipe would save how much memory, by the model of `ttrl.costs.memory`. Needs nothing but Python."""

from collections.abc import Mapping
from typing import Any

from ttrl.costs.memory import Device, training_memory
from ttrl.costs.training_settings import HEAD_CHUNK, Settings, Workload

LORA_RANK = 16
"""Of what is suggested."""


def savings(
    config: Mapping[str, Any], settings: Mapping[str, Any], workload: Workload, *, device: Device = "cpu", ranks: int = 1
) -> dict[str, float]:
    """Bytes of a process's peak that a setting other than the one in use would save, by the setting, the largest first.

    Arguments as those of `training_memory`. Raises ModelFolderError where config.json does not say the model's shape.
    """
    chosen = Settings.of(settings)

    def peak(ranks: int = ranks, **changes: object) -> float:
        return training_memory(config, {**settings, **changes}, workload, device=device, ranks=ranks).peak

    changes: dict[str, object] = {"dtype": "bf16", "activation_checkpointing": True}
    positions = chosen.rows_per_microbatch * workload.row_length
    chunk = chosen.head_chunk(positions, device)
    # The head's own chunk where that is smaller; else four times as many chunks.
    changes["num_output_chunks"] = None if chunk > HEAD_CHUNK[device] else 4 * -(-positions // int(chunk))
    changes["rows_per_microbatch"] = max(1, chosen.rows_per_microbatch // 2)
    four_bits = chosen.lora_base_dtype == "nf4"
    if device == "cuda":
        changes["activation_offloading"] = True
        if not chosen.optimizer_on_cpu:  # it excludes both
            changes |= {"optimizer": "adamw_8bit"} | ({} if four_bits else {"cpu_offload": True})
    now = peak()
    found = {f"{name}: {value}": now - peak(**{name: value}) for name, value in changes.items()}
    if chosen.lora_rank is None and chosen.tensor_parallel == 1:
        found[f"lora_rank: {LORA_RANK} (adapters alone are trained)"] = now - peak(lora_rank=LORA_RANK)
    if not (four_bits or chosen.optimizer_on_cpu):  # both are for one process
        found[f"{2 * ranks} processes with different rows"] = now - peak(2 * ranks)
    worth = {name.replace("True", "true").replace("None", "null"): saved for name, saved in found.items() if saved > 0}
    return dict(sorted(worth.items(), key=lambda pair: -pair[1]))
