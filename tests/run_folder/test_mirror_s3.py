"""The mirror of a run folder in a real S3 server (moto's), by address and with credentials from the environment."""

import pytest

from ttrl import TrainConfig
from ttrl.errors import StorageError
from ttrl.run_folder.folder import RunFolder
from ttrl.run_folder.mirror import mirrored
from ttrl.run_folder.mirror_store import MirrorStore


class QuickStore(MirrorStore):
    first_pause, part_bytes = 0.01, 5 * 2**20  # the smallest parts that S3 takes


def config(path, address):
    return TrainConfig(run=str(path), model="m", iterations=9, mirror=address)


def make_run(folder, size):
    for number, phase, names in ((0, "prepare", ["checkpoint"]), (1, "train", ["checkpoint", "state"])):
        for name in names:
            path = folder.iteration(number).path / name / "weights"
            path.parent.mkdir(parents=True)
            path.write_bytes(bytes([number]) * size)
        folder.iteration(number).mark(phase, names, {"trained": True})


def test_a_run_goes_there_and_comes_back(bucket, tmp_path):
    """In parts, where files are larger than one."""
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    with first.locked(), mirrored(config(first.path, bucket), first, store_class=QuickStore):
        make_run(first, 11 * 2**20)
    keys = MirrorStore(bucket).keys()
    assert sorted(keys) == [
        "iterations/0000/checkpoint/weights",
        "iterations/0000/done/prepare.json",
        "iterations/0001/checkpoint/weights",
        "iterations/0001/done/train.json",
        "iterations/0001/state/weights",
        "owner.json",  # which says that it was released
    ]
    assert keys["iterations/0001/state/weights"] == 11 * 2**20
    with second.locked(), mirrored(config(second.path, bucket), second, store_class=QuickStore):
        second.iteration(1).verify("train")
        assert second.policy_version(5) == 1


def test_a_bucket_that_is_not_there(bucket, tmp_path, caplog):
    folder = RunFolder(tmp_path)
    words = r"s3://no-such-bucket/x: could not .*credentials come from the environment"
    with (
        folder.locked(),
        pytest.raises(StorageError, match=words),
        mirrored(config(tmp_path, "s3://no-such-bucket/x"), folder, store_class=QuickStore),
    ):
        pass
    assert "topsecret" not in caplog.text
