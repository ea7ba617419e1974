"""The file that says how a cluster is reached."""

from __future__ import annotations

import os

import pytest

from kept.client.bootstrap import Bootstrap, other_readers, read_security
from kept.storage.errors import ConfigurationError


@pytest.mark.parametrize(
    ("mode", "who"), [(0o600, ""), (0o640, "its group"), (0o644, "everybody"), (0o604, "everybody")]
)
def test_who_else_reads_a_file(tmp_path, mode, who):
    file = tmp_path / "client.properties"
    file.touch()
    os.chmod(file, mode)
    assert other_readers(str(file)) == who


def test_an_error_names_the_file(tmp_path):
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=TLS\n")
    with pytest.raises(ConfigurationError, match=r"client\.properties: security\.protocol is TLS"):
        read_security(str(file))


def test_addresses_alone_mean_no_security():
    assert str(Bootstrap.of("a:1")) == "a:1"
    assert Bootstrap.of(Bootstrap.of("a:1")).security.protocol == "PLAINTEXT"
