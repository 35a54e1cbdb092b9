"""What a run keeps on disk, and where else. A part of a run's config."""

from dataclasses import dataclass

from ttrl.configs import Config
from ttrl.configs.base import at_least


@dataclass(kw_only=True)
class StorageConfig(Config):
    """A part of TrainConfig. No setting here changes what is trained, so all of them may change when a run is continued."""

    keep_best: int = 1
    """How many of the best checkpoints by `validation_metric` are kept, beside the newest `keep_checkpoints`."""
    keep_every: int | None = None
    """The checkpoint of every so manieth iteration is kept for good; None: of none."""
    mirror: str | None = None
    """Where the run folder is copied to while the run goes on, phase by phase: an object store, such as "s3://bucket/runs/name",
    or a folder. The same call on another machine, where the run folder is not there, continues from that copy. With `run` an
    address itself, such as "s3://bucket/runs/name", the folder runs/name works here, and the address is the mirror."""

    def storage_problems(self) -> list[str]:
        """What is wrong with them, one line each."""
        found = at_least(1, keep_every=self.keep_every, keep_best=self.keep_best)
        if self.mirror is not None and not self.mirror.strip():
            found.append('mirror is empty; give an address such as "s3://bucket/runs/name", or leave it out')
        return found
