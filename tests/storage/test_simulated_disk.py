"""What the disk in memory says that every power cut keeps."""

from __future__ import annotations

from tests.support.simulated_disk import SimulatedDisk


def test_what_is_durable_is_what_every_power_cut_keeps() -> None:
    disk = SimulatedDisk(seed=1)
    disk.mkdir("/d")
    file = disk.open_new("/d/a")
    disk.writev(file, [b"one"], 0)
    disk.fsync(file)
    assert disk.durable("/d/a") is None, "its name may be lost"
    disk.fsync_dir("/d")
    disk.fsync_dir("/")
    assert disk.durable("/d/a") == b"one"
    disk.writev(file, [b"two"], 3)
    assert disk.durable("/d/a") == b"one"
    assert disk.durable("/d") is None and disk.durable("/d/b") is None
    for seed in range(20):
        assert disk.after_power_loss(seed).read("/d/a").startswith(b"one")
    disk.fsync(file)
    assert disk.durable("/d/a") == b"onetwo"
    disk.rename("/d/a", "/d/b")
    assert disk.durable("/d/a") == b"onetwo" and disk.durable("/d/b") is None
