"""TLS, logins, ACLs and network policies of the Helm chart."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kept.client.bootstrap import read_security
from kept.node.config.node_config import NodeConfig
from kept.node.config.sasl import sasl_settings
from kept.testing.ports import free_port
from tests.deploy.chart import VALUES, Refused, of_kind, only, render, started_with
from tests.support.certificates import Authority

pytestmark = [pytest.mark.slow, pytest.mark.helm]

CERTIFICATES, LOGINS, TOKENS = VALUES["certificates"], VALUES["logins"], VALUES["tokens"]
JWKS = "sasl.oauthbearer.jwks.endpoint.url"
START_DEADLINE_S = 60


def changed(values, **sections):
    """``values`` with some settings of sections replaced."""
    more = {name: {**values.get(name, {}), **section} for name, section in sections.items()}
    return {**values, **more}


def test_the_certificate_names_all_by_which_nodes_are_reached():
    values = changed(
        CERTIFICATES,
        external={"enabled": True, "domain": "logs.example"},
        tls={"extraNames": ["kafka.example"], "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}},
    )
    stated = only(values, "Certificate")["spec"]
    assert stated["issuerRef"] == {
        "name": "ca",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }
    assert stated["commonName"] == "kept-node"
    assert {"server auth", "client auth"} <= set(stated["usages"])
    assert stated["privateKey"]["encoding"] == "PKCS8"
    assert set(stated["dnsNames"]) == {
        "*.kept-nodes.kept.svc.cluster.local",
        "kept.kept.svc.cluster.local",
        "kept.kept.svc",
        "kept.kept",
        "kept",
        "localhost",
        "kept-0.logs.example",
        "kept-1.logs.example",
        "kept-2.logs.example",
        "kafka.example",
    }
    pod = only(values, "StatefulSet")["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "tls")
    assert volume["secret"]["secretName"] == stated["secretName"]


def test_with_a_secret_no_certificate_is_asked_for():
    assert of_kind(LOGINS, "Certificate") == []
    assert of_kind({}, "Certificate") == []


def test_only_the_group_of_the_node_reads_secrets():
    for document in (only(LOGINS, "StatefulSet"), *of_kind(LOGINS, "Job")):
        pod = document["spec"]["template"]["spec"]
        secrets = {v["name"]: v["secret"] for v in pod["volumes"] if "secret" in v}
        assert {name: secret["secretName"] for name, secret in secrets.items()} == {
            "tls": "kept-certificate",
            "admin": "kept-admin",
        }
        assert {secret["defaultMode"] for secret in secrets.values()} == {0o440}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts["tls"]["readOnly"] and mounts["admin"]["readOnly"]
        environment = {entry["name"]: entry for entry in container["env"]}
        assert environment["KEPT_COMMAND_CONFIG"]["value"] == "/etc/kept/client.properties"
    init, *_ = only(LOGINS, "StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    assert {mount["name"] for mount in init["volumeMounts"]} == {"config", "run", "node-reader"}


def test_probes_speak_tls_where_the_port_does():
    for values, scheme in (({}, None), (CERTIFICATES, "HTTPS"), (LOGINS, "HTTPS")):
        (node,) = only(values, "StatefulSet")["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert node[probe]["httpGet"].get("scheme") == scheme


def test_prometheus_logs_in_and_knows_the_authority():
    values = changed(CERTIFICATES, monitoring={"serviceMonitor": True})
    (endpoint,) = only(values, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and "basicAuth" not in endpoint
    assert endpoint["tlsConfig"]["serverName"] in only(values, "Certificate")["spec"]["dnsNames"]
    (endpoint,) = only(LOGINS, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["tlsConfig"]["ca"]["secret"] == {"name": "kept-certificate", "key": "ca.crt"}
    assert endpoint["basicAuth"]["password"] == {"name": "prometheus", "key": "password"}


def test_the_network_policy_lets_in_who_has_to():
    values = changed(LOGINS, networkPolicy={"clients": [{"podSelector": {}}]})
    policy = only(values, "NetworkPolicy")["spec"]
    peers = {str(rule.get("from")): rule["ports"] for rule in policy["ingress"]}
    metrics = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    assert peers[str(metrics)] == [{"port": "internal"}]
    upgrade, rollback = of_kind(values, "Job")
    labels = upgrade["spec"]["template"]["metadata"]["labels"]
    assert labels == rollback["spec"]["template"]["metadata"]["labels"]
    assert peers[str([{"podSelector": {"matchLabels": labels}}])] == [{"port": "internal"}]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    nodes = [{"podSelector": policy["podSelector"]}]
    assert {"to": nodes} in policy["egress"]
    assert "egress" not in only({}, "NetworkPolicy")["spec"]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("https://idp.example:8443/keys", 8443),
        ("https://idp.example/keys", 443),
        ("https://[2001:db8::7]/a:9/keys", 443),
        ("https://[2001:db8::7]:9443/keys", 9443),
    ],
)
def test_the_network_policy_lets_nodes_fetch_the_keys_of_tokens(url, port):
    policy = only(changed(TOKENS, config={JWKS: url}), "NetworkPolicy")["spec"]
    rule = {"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}], "ports": [{"port": port}]}
    assert policy["egress"].count(rule) == 1
    open_too = [one for one in policy["egress"] if "to" not in one]
    assert {p["port"] for one in open_too for p in one["ports"]} == {53, 443, 6443}, "DNS, the API"


def test_keys_in_a_file_want_no_way_out():
    values = changed(TOKENS, config={JWKS: "file:///keys/jwks.json"}, networkPolicy={"jwks": []})
    rules = only(values, "NetworkPolicy")["spec"]["egress"]
    assert [rule["to"] for rule in rules if "to" in rule] == [
        [{"podSelector": only(values, "NetworkPolicy")["spec"]["podSelector"]}]
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tls": {"enabled": True}}, "where does the certificate come from"),
        (changed(CERTIFICATES, tls={"existingSecret": "kept"}), "are both given"),
        ({"tls": {"existingSecret": "kept"}}, "nothing would be encrypted"),
        ({"tls": {"issuerRef": {"name": "ca"}}}, "nothing would be encrypted"),
        (changed(CERTIFICATES, tls={"nodePrincipal": "CN=a,O=b"}), "with cert-manager the subject"),
        (changed(CERTIFICATES, tls={"duration": "24h"}), "of 24h cannot be renewed 720h before"),
        (changed(CERTIFICATES, tls={"duration": "a year"}), "duration"),
        (changed(CERTIFICATES, tls={"extraNames": ["a..b"]}), "extraNames"),
        (changed(CERTIFICATES, tls={"secret": "x"}), "secret"),
        ({"auth": {"enabled": True, "adminSecret": "a"}}, "auth.enabled: wants tls.enabled=true"),
        (changed(LOGINS, auth={"adminSecret": ""}), "first password of admin"),
        (changed(LOGINS, auth={"mechanisms": ["PLAIN"]}), "add SCRAM-SHA-512"),
        (changed(LOGINS, auth={"mechanisms": ["GSSAPI"]}), "mechanisms"),
        (changed(LOGINS, auth={"mechanisms": ["OAUTHBEARER"]}), "add SCRAM-SHA-512"),
        (changed(LOGINS, auth={"mechanisms": []}), "mechanisms"),
        (changed(LOGINS, auth={"adminUser": "a;b"}), "adminUser"),
        (changed(LOGINS, auth={"superUsers": ["ops"]}), "superUsers"),
        (changed(LOGINS, auth={"enabled": False}), "nobody would log in"),
        (changed(LOGINS, monitoring={"basicAuthSecret": ""}), "Prometheus has to log in"),
        (changed(LOGINS, config={"ssl.client.auth": "required"}), "ssl.client.auth"),
        ({"config": {"super.users": "User:x"}}, "super.users is set by the values tls and auth"),
        ({"config": {"ssl.keystore.location": "/x"}}, "set by the values tls and auth"),
        (
            {"networkPolicy": {"enabled": False, "metricsNamespace": "monitoring"}},
            "networkPolicy.metricsNamespace is given",
        ),
        ({"networkPolicy": {"enabled": False, "egress": True}}, "so everybody may connect"),
        (changed(TOKENS, networkPolicy={"jwks": []}), "would keep nodes from https://idp.example"),
        (changed(TOKENS, networkPolicy={"egress": False}), "so nodes may connect to everything"),
        (changed(LOGINS, networkPolicy={"jwks": [{"podSelector": {}}]}), "nodes fetch no keys"),
        (changed(TOKENS, networkPolicy={"jwks": ["idp.example"]}), "jwks"),
        (changed(TOKENS, networkPolicy={"jwks": [{"ipBlock": {}}]}), "jwks"),
        (changed(TOKENS, networkPolicy={"enabled": False}), "so everybody may connect"),
    ],
)
def test_contradictions_are_refused(values, said):
    with pytest.raises(Refused, match=said):
        render(values)


class Pod:
    """A node started as its pod would: files of secrets, settings, environment."""

    def __init__(self, directory: Path, values, password: str = "first password") -> None:
        self.directory, self.authority = directory, Authority(directory)
        self.tls, self.admin = directory / "tls", directory / "admin"
        self.tls.mkdir()
        self.admin.mkdir()
        (self.admin / "password").write_text(password)
        self.issue("kept-node")
        self.port, node_port = free_port(), free_port()
        paths = {
            "/etc/kept-tls": str(self.tls),
            "/etc/kept-admin": str(self.admin),
            "$HOSTNAME.kept-nodes.kept.svc.cluster.local": "localhost",
            "kept-0.kept-nodes.kept.svc.cluster.local": "localhost",
            ":9092": f":{self.port}",
            ":10092": f":{node_port}",
        }
        self.config, self.environ = started_with(
            {"replicas": 1, "voters": 1, "rackFromZone": False, **values}, 0, directory, paths=paths
        )

    def issue(self, name):
        """A certificate as the mounted secret has it."""
        store = Path(self.authority.issue(name, "localhost")).read_text()
        key, chain = store.split("-----BEGIN CERTIFICATE-----", 1)
        (self.tls / "tls.key").write_text(key)
        (self.tls / "tls.crt").write_text(f"-----BEGIN CERTIFICATE-----{chain}")
        (self.tls / "ca.crt").write_text(self.authority.ca_pem)

    def kept(self, *arguments, config="client.properties"):
        """The command line in the pod."""
        return subprocess.run(
            [sys.executable, "-m", "kept", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={
                **os.environ,
                "KEPT_BOOTSTRAP": f"localhost:{self.port}",
                "KEPT_COMMAND_CONFIG": str(self.directory / config),
            },
        )

    def probe(self, path):
        """What the kubelet sees: any certificate will do, and it shows none."""
        context = ssl._create_unverified_context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        url = f"https://localhost:{self.port}{path}"
        try:
            with urllib.request.urlopen(url, context=context, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as refusal:
            return refusal.code

    def __enter__(self):
        with open(self.directory / "log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kept",
                    "serve",
                    "--config-file",
                    self.config,
                    "--data-dir",
                    str(self.directory / "data"),
                ],
                env={**os.environ, **self.environ, "PATH": os.environ["PATH"]},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        assert " ready on " in self.process.stdout.readline(), self.log()
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.communicate(timeout=START_DEADLINE_S)

    def log(self):
        return (self.directory / "log").read_text()


def without_external(values):
    return {name: section for name, section in values.items() if name != "external"}


def test_a_node_with_logins_starts_and_its_administrator_gets_in(tmp_path):
    values = changed(without_external(LOGINS), tls={"nodePrincipal": "CN=kept-node"})
    with Pod(tmp_path, values) as pod:
        assert pod.probe("/healthz") == pod.probe("/readyz") == 200
        assert pod.probe("/metrics") == 401
        status = pod.kept("cluster", "status", "--check")
        assert status.returncode == 0, status.stderr
        assert "readable" not in status.stderr and "first password" not in pod.log()
        (pod.admin / "password").write_text("another")
        assert pod.kept("topic", "list").returncode == 1
    assert "insecure settings" not in pod.log()


def test_a_node_with_tls_alone_starts(tmp_path):
    with Pod(tmp_path, CERTIFICATES) as pod:
        assert pod.probe("/readyz") == 200
        assert pod.kept("topic", "create", "t").returncode == 0
        assert read_security(str(tmp_path / "client.properties")).protocol == "SSL"


@pytest.mark.parametrize("password", ["ends with\n", 'has "', "has \\", "ends with\r\n"])
def test_a_password_that_would_not_be_the_same_everywhere_is_refused(tmp_path, password):
    with pytest.raises(Refused, match="Secret kept-admin: a password with"):
        Pod(tmp_path, without_external(LOGINS), password)


def test_every_mechanism_gives_the_administrator_a_credential(tmp_path):
    config, environ = started_with(
        LOGINS, 2, tmp_path, paths={"/etc/kept-admin/password": str(tmp_path / "rack")}
    )
    settings = NodeConfig.load(config, {}, environ)
    mechanisms = re.findall(r"(SCRAM-SHA-\d+)=\[name=admin", settings.bootstrap_scram)
    assert mechanisms == ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert settings.super_users == "User:admin;User:CN=node,O=Example;User:ops"
    assert {listener.protocol for listener in settings.listeners} == {"SASL_SSL"}
    assert settings.node_listener.protocol == "SSL"


def test_access_tokens_are_taken_beside_passwords(tmp_path):
    given = changed(
        LOGINS,
        auth={"mechanisms": ["SCRAM-SHA-512", "OAUTHBEARER"]},
        config={JWKS: "https://idp.example/keys"},
        networkPolicy={"jwks": [{"podSelector": {}}]},
    )
    config, environ = started_with(
        given, 2, tmp_path, paths={"/etc/kept-admin/password": str(tmp_path / "rack")}
    )
    settings = NodeConfig.load(config, {}, environ)
    listeners = [sasl_settings(settings, one.name) for one in settings.listeners]
    assert {one.mechanisms for one in listeners} == {("SCRAM-SHA-512", "OAUTHBEARER")}
    assert {one.tokens.jwks_url for one in listeners} == {"https://idp.example/keys"}
