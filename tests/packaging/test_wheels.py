"""What release/wheels.py builds from."""

from __future__ import annotations

import subprocess
import tarfile

import pytest

from release import wheels


def test_a_source_archive_is_unpacked_by_any_python_3_11(tmp_path, monkeypatch):
    """Python 3.11.2, which Debian 12 has, knows no filters of what is unpacked."""
    project = tmp_path / "kept_log-1"
    project.mkdir()
    (project / "pyproject.toml").touch()
    subprocess.run(["tar", "-czf", "sdist.tar.gz", "kept_log-1"], cwd=tmp_path, check=True)
    unpack = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda archive, path: unpack(archive, path))
    (tmp_path / "into").mkdir()
    found = wheels.unpacked(tmp_path / "sdist.tar.gz", tmp_path / "into")
    assert (found / "pyproject.toml").exists()


@pytest.mark.parametrize("text", [b"", b"no archive"])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "sdist.tar.gz").write_bytes(text)
    (tmp_path / "into").mkdir()
    with pytest.raises(wheels.WheelRefused, match="is no source archive"):
        wheels.unpacked(tmp_path / "sdist.tar.gz", tmp_path / "into")
