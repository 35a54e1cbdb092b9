"""How a recipe stays up between iterations. A part of the recipe's config."""

from dataclasses import dataclass

from ttrl.configs.base import Config


@dataclass(kw_only=True)
class ResidentConfig(Config):
    """A part of GRPOConfig."""

    follow: str | None = None
    """Folder in which the configs of iterations appear, one after the other (`ttrl.system.request_folder`); this config then says
    what the process is made of, and which model and state the first of them will probably ask for, to be loaded meanwhile. None:
    one iteration, that of this config."""
    free_memory: bool = False
    """With `follow`: between iterations model and optimizer wait in the CPU's memory, and the GPU's is free for others."""
