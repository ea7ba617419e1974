"""Values of settings that stand in files and in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kept.client.security.config_providers import resolve
from kept.client.security.security import Security
from kept.client.security.tls import tls_config
from kept.storage.errors import ConfigurationError
from tests.support.certificates import Authority


def test_a_mounted_secret_is_a_key_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cert-manager mounts it: tls.key, tls.crt and ca.crt."""
    authority = Authority(tmp_path)
    keys = Path(authority.issue("node", password="opens")).read_text()
    end = "-----END ENCRYPTED PRIVATE KEY-----\n"
    key, chain = keys.split(end)
    (tmp_path / "tls.key").write_text(key + end)
    (tmp_path / "tls.crt").write_text(chain)
    (tmp_path / "secrets.properties").write_text("key.password=opens\n")
    properties = {
        "ssl.keystore.key": f"${{directory:{tmp_path}:tls.key}}",
        "ssl.keystore.certificate.chain": f"${{directory:{tmp_path}:tls.crt}}",
        "ssl.truststore.location": "${env:CA}",
        "ssl.key.password": f"${{file:{tmp_path}/secrets.properties:key.password}}",
    }
    monkeypatch.setenv("CA", authority.ca)
    config = tls_config(properties)
    assert config.keys is not None and config.keys.key_password == "opens" and config.trust
    (tmp_path / "tls.crt").write_text(Path(authority.issue("other")).read_text())
    assert tls_config(properties) != config, "it is read anew"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${env:KEPT_TEST_NOBODY}", "there is no such environment variable"),
        ("${file:/none:a}", "No such file"),
        ("${file:FILE:b}", "has no b"),
        ("${file:FILE}", "is wanted"),
        ("${directory:/etc:../passwd}", "a name of a file in that directory"),
        ("${vault:a:b}", "is wanted"),
    ],
)
def test_what_refers_to_nothing_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "some.properties"
    path.write_text("a=secret\n")
    with pytest.raises(ConfigurationError, match=why) as refused:
        resolve("ssl.key.password", text.replace("FILE", str(path)))
    assert str(refused.value).startswith("ssl.key.password: ${")
    assert "secret" not in str(refused.value)


def test_other_texts_are_left_alone() -> None:
    assert resolve("x", "a${b}$c") == "a${b}$c"


def test_a_login_may_refer_to_its_password(tmp_path):
    (tmp_path / "password").write_text("s3cret")
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"

    def login(password):
        return Security(
            {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.jaas.config": f'{module} required username="ada" password="{password}";',
            }
        )

    referring = login(f"${{directory:{tmp_path}:password}}")
    assert referring.http_login("localhost") == ("ada", "s3cret")
    assert login("s3cret").has_secrets and not referring.has_secrets
    with pytest.raises(ConfigurationError, match=r"sasl\.jaas\.config: .*: No such file"):
        login(f"${{directory:{tmp_path}:gone}}")
