"""Whether the trainer stays up between iterations. A part of a run's config."""

from dataclasses import dataclass
from typing import Literal

from ttrl.configs import Config


@dataclass(kw_only=True)
class TrainerConfig(Config):
    """A part of TrainConfig. No setting here changes what is trained, so all of them may change when a run is continued."""

    trainer: Literal["resident", "once"] = "resident"
    """"resident": one trainer process for the whole run, with model, optimizer and compiled code kept warm; "once": a process of
    its own for each iteration. Both give the same weights."""
    trainer_memory: Literal["auto", "keep", "free"] = "auto"
    """What a resident trainer does between iterations: "keep" everything where it is, or "free" the GPU's memory for the server
    (model and optimizer wait in the CPU's). "auto": free on CUDA, where the server shares the device; keep on CPU."""
    trainer_restarts: int = 2
    """How often in one iteration a trainer that was killed, or has lost another machine, is started again before the run ends."""

    def resolved_trainer_memory(self, device: str) -> Literal["keep", "free"]:
        """`trainer_memory` on a device, "cpu" or "cuda"."""
        if self.trainer_memory != "auto":
            return self.trainer_memory
        return "free" if device == "cuda" else "keep"
