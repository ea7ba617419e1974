"""The Helm chart: it lints, renders valid manifests of nodes that start, and refuses nonsense."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import yaml

import kept
from kept.node.config.node_config import NodeConfig
from tests.deploy import chart
from tests.deploy.chart import CHART, VALUES, Refused, helm, of_kind, only, render, started_with
from tests.deploy.files import DEPLOY
from tests.tools import judges

pytestmark = [pytest.mark.slow, pytest.mark.helm]

ALL = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
KUBERNETES = ("1.28", "1.34")
VALIDATE = """
import json, sys, yaml, kubernetes_validate
for values, text in json.load(sys.stdin).items():
    for one in yaml.safe_load_all(text):
        if one and not one["apiVersion"].startswith(("monitoring.coreos.com/", "cert-manager.io")):
            print(values + ":", one["kind"], flush=True)
            kubernetes_validate.validate(one, sys.argv[1], strict=True)
"""


@ALL
def test_it_lints(values):
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), values=values)


@pytest.mark.parametrize("version", KUBERNETES)
def test_manifests_are_valid_strictly(version):
    texts = {name: render(values) for name, values in VALUES.items()}
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, version],
        input=json.dumps(texts),
        text=True,
        check=False,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(judges.schemas())},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]
    assert done.stdout.count("StatefulSet") == len(VALUES)


def test_the_plain_manifests_are_up_to_date():
    assert chart.PLAIN.read_text() == chart.plain(), "run python -m tests.deploy.chart"


def start(values, ordinal, tmp_path, rack=""):
    """The settings of a pod."""
    config, environ = started_with(values, ordinal, tmp_path, rack=rack)
    return NodeConfig.load(config, {}, environ)


@ALL
def test_every_pod_gets_settings_that_a_node_takes(values, tmp_path):
    replicas, voters = values.get("replicas", 3), values.get("voters", 3)
    for ordinal in range(replicas):
        settings = start(values, ordinal, tmp_path, rack="zone-b\n")
        assert settings.node_id == ordinal and settings.broker_rack == "zone-b"
        assert [v.node_id for v in settings.controller_quorum_voters] == list(range(voters))
        assert ("controller" in settings.process_roles) == (ordinal < voters)
        own = f"kept-{ordinal}.kept-nodes.kept.svc.cluster.local"
        assert settings.advertised_node_listener.host == own
        assert settings.advertised_listeners[0].host == own
        stated = only(values, "StatefulSet")["spec"]["template"]["spec"]
        assert stated["terminationGracePeriodSeconds"] * 1000 > settings.shutdown_timeout_ms


def test_settings_arrive_as_they_were_given(tmp_path):
    settings = start(VALUES["many"], 6, tmp_path)
    assert settings.log_segment_bytes == 1 << 30
    assert settings.log_cleaner_min_cleanable_ratio == 0.3
    assert settings.auto_create_topics_enable is False
    assert settings.log_cleanup_policy == ("compact", "delete")
    assert (settings.default_replication_factor, settings.min_insync_replicas) == (5, 3)
    assert settings.broker_rack is None
    defaults = start({}, 0, tmp_path)
    assert (defaults.default_replication_factor, defaults.min_insync_replicas) == (3, 2)


def test_addresses_for_clients_outside(tmp_path):
    told = start(VALUES["load balancers"], 2, tmp_path).advertised_listeners
    assert ("EXTERNAL", "kept-2.logs.example", 9092) in [(a.name, a.host, a.port) for a in told]
    told = start(VALUES["node ports"], 2, tmp_path).advertised_listeners
    assert ("EXTERNAL", "kept-2.logs.example", 30094) in [(a.name, a.host, a.port) for a in told]
    services = {s["metadata"]["name"]: s["spec"] for s in of_kind(VALUES["node ports"], "Service")}
    own = services["kept-2-external"]
    assert own["ports"][0]["nodePort"] == 30094
    assert own["selector"]["statefulset.kubernetes.io/pod-name"] == "kept-2"


def test_what_pods_may_do():
    stated = only({}, "StatefulSet")["spec"]
    pod = stated["template"]["spec"]
    assert stated["podManagementPolicy"] == "Parallel"
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod["initContainers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    (node,) = pod["containers"]
    assert "node-reader" not in [mount["name"] for mount in node["volumeMounts"]]
    assert node["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert node["livenessProbe"]["httpGet"]["path"] == "/healthz"
    headless = next(s["spec"] for s in of_kind({}, "Service") if s["spec"].get("clusterIP"))
    assert headless["publishNotReadyAddresses"] is True
    assert only({}, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_the_network_policy_keeps_the_port_for_nodes_to_nodes():
    for values in VALUES.values():
        if values.get("networkPolicy", {}).get("enabled") is False:
            continue
        policy = only(values, "NetworkPolicy")["spec"]
        for rule in policy["ingress"]:
            if {"port": "node"} in rule["ports"]:
                assert rule["from"] == [{"podSelector": policy["podSelector"]}]


def test_pods_restart_for_new_settings_and_not_for_more_brokers():
    def checksum(values):
        template = only(values, "StatefulSet")["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/config"]

    assert checksum({}) == checksum({"replicas": 5})
    assert checksum({}) != checksum({"config": {"log.retention.hours": 1}})
    external = VALUES["node ports"]
    assert checksum(external) == checksum({**external, "replicas": 9})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 3}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "three"}, "replicas"),
        ({"voters": 2}, "voters"),
        ({"voters": 5}, "voters: 5 of 3 nodes cannot vote"),
        ({"storage": {"size": "lots"}}, "storage.size|storage/size"),
        ({"image": {"repository": ""}}, "repository"),
        ({"antiAffinity": "none"}, "antiAffinity"),
        ({"config": {"listeners": "PLAINTEXT://:1"}}, "config"),
        ({"config": {"node.id": 4}}, "config"),
        ({"config": {"log.dirs": ["/a"]}}, "config"),
        ({"config": {"default.replication.factor": 5}}, "wants that many nodes, and replicas is 3"),
        ({"config": {"min.insync.replicas": 4}}, "can never be in sync"),
        ({"config": {"default.replication.factor": 1}}, "min.insync.replicas=2 of"),
        ({"image": {"repository": "kept:1.0"}}, "repository"),
        ({"image": {"tag": "a b"}}, "tag"),
        ({"podLabels": {"app.kubernetes.io/name": "other"}}, "podLabels"),
        ({"podAnnotations": {"checksum/config": "x"}}, "podAnnotations"),
        ({"tolerations": [{"operatr": "Exists"}]}, "operatr"),
        ({"networkPolicy": {"clients": [{"podSelectr": {}}]}}, "podSelectr"),
        ({"networkPolicy": {"clients": [{}]}}, "clients"),
        ({"external": {"enabled": True, "domain": "a..b"}}, "domain"),
        ({"resources": {"limits": {"memory": 0}}}, "memory"),
        ({"resources": {"limits": {"memroy": "1Gi"}}}, "limits"),
        ({"resources": {"limits": {"memory": "much"}}}, "memory"),
        ({"resources": {"limits": {"memory": "4K"}}}, "memory"),
        ({"resources": {"limits": {"memory": "256Mi"}}}, "512Mi, which is more than the 256Mi of"),
        ({"resources": {"limits": {"cpu": 0.25}}}, "cpu: requests has 500m, which is more than"),
        ({"external": {"enabled": True}}, "domain"),
        ({"external": {"enabled": True, "domain": "x.org", "type": "ClusterIP"}}, "type"),
        (
            {
                "external": {
                    "enabled": True,
                    "domain": "x",
                    "type": "NodePort",
                    "firstNodePort": 32766,
                }
            },
            "3 nodes from 32766 on want ports up to 32768",
        ),
        ({"monitoring": {"interval": "often"}}, "interval"),
        ({"monitoring": {"interval": "-5s"}}, "interval"),
        ({"shutdownTimeoutSeconds": -1}, "shutdownTimeoutSeconds"),
    ],
)
def test_nonsense_is_refused(values, said):
    with pytest.raises(Refused, match=said):
        render(values)


def test_a_release_name_that_is_too_long_is_refused():
    with pytest.raises(Refused, match="40 characters are the most"):
        render(None, release="a" * 50)
    names = [s["metadata"]["name"] for s in of_kind(None, "Service", release="logs")]
    assert names == ["logs-kept-nodes", "logs-kept"]


class Api(BaseHTTPRequestHandler):
    """Kubernetes' API, as far as the init container asks it."""

    def do_GET(self):
        right = self.headers["Authorization"] == "Bearer secret"
        labels = {"topology.kubernetes.io/zone": "north-1"} if "/zoned" in self.path else {}
        self.send_response(200 if right and self.path.startswith("/api/v1/nodes/") else 403)
        self.end_headers()
        self.wfile.write(json.dumps({"metadata": {"labels": labels}}).encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("node", "token", "zone"),
    [("zoned", "secret", "north-1"), ("bare", "secret", ""), ("zoned", "x", None)],
)
def test_the_rack_is_the_zone_of_the_node(tmp_path, node, token, zone):
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=k",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            "key",
            "-out",
            "ca.crt",
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    (tmp_path / "token").write_text(token + "\n")
    script = next(m["data"]["rack.py"] for m in of_kind({}, "ConfigMap") if "rack.py" in m["data"])
    script = script.replace("/var/run/secrets/node-reader", str(tmp_path))
    script = script.replace("/run/kept/rack", f"{tmp_path}/rack")
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trust.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
        server.socket = trust.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env={
                "NODE_NAME": node,
                "KUBERNETES_SERVICE_HOST": "127.0.0.1",
                "KUBERNETES_SERVICE_PORT": str(server.server_port),
            },
        )
        thread.join(20)
    if zone is None:
        assert done.returncode and "403" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rack").read_text() == zone
    assert (zone or "has no label") in done.stderr


@pytest.mark.parametrize(
    ("replicas", "nodes", "voters", "said"),
    [
        (3, {0: 5, 1: 5, 2: 5}, [0, 1, 2], None),
        (3, {0: 5, 1: 5, 2: 5, 3: 0}, [0, 1, 2], None),
        (3, {0: 5, 1: 5, 2: 5, 3: 7}, [0, 1, 2], "node 3 holds 7 replicas\nkept cluster drain 3"),
        (3, {0: 5, 3: 7, 4: 1}, [0, 1, 2], "kept cluster drain 3 4 --wait\n"),
        (1, {0: 5, 1: 0, 2: 0}, [0, 1, 2], "node 2 votes\nkept cluster voter remove 1\n"),
        (3, None, [], "no answer\nWithout an answer it is not known what the nodes from 3 on hold"),
    ],
)
@pytest.mark.parametrize("step", ["upgrade", "rollback"])
def test_nodes_that_are_needed_are_not_taken_away(tmp_path, replicas, nodes, voters, said, *, step):
    answer = {
        "nodes": [{"node_id": n, "replicas": held} for n, held in (nodes or {}).items()],
        "voters": voters,
    }
    command = f"echo '{json.dumps(answer)}'" if nodes else "echo no answer >&2; exit 1"
    (tmp_path / "kept").write_text(f"#!/bin/sh\n{command}\n")
    (tmp_path / "kept").chmod(0o755)
    jobs = of_kind({"replicas": replicas, "voters": 1}, "Job")
    (job,) = (j for j in jobs if j["metadata"]["annotations"]["helm.sh/hook"] == f"pre-{step}")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][2:] == [step, str(replicas), "kept:9092"]
    done = subprocess.run(
        [sys.executable, CHART / "files" / "scale_down.py", *container["command"][2:]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    goes_on = said is None or (step == "rollback" and nodes is None)
    assert done.returncode == (not goes_on), done.stderr
    assert said is None or said in done.stderr
    without = {"upgrade": "upgrade --set scaleDownCheck=false", "rollback": "rollback --no-hooks"}
    assert (f"helm {without[step]}" in done.stderr) is not goes_on


def test_the_check_of_replicas_is_there_before_its_jobs():
    values = {"scaleDownCheck": True}
    hooks = {
        (m["kind"], m["metadata"]["name"]): m["metadata"]["annotations"]["helm.sh/hook"]
        for m in [*of_kind(values, "Job"), *of_kind(values, "ConfigMap")]
        if "scale-down" in m["metadata"]["name"]
    }
    assert hooks == {
        ("ConfigMap", "kept-scale-down"): "pre-upgrade,pre-rollback",
        ("Job", "kept-scale-down"): "pre-upgrade",
        ("Job", "kept-scale-down-rollback"): "pre-rollback",
    }
    assert not of_kind({"scaleDownCheck": False}, "Job")


def test_the_version_is_the_packages():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == kept.__version__
    assert f"${{IMAGE:-kept:{kept.__version__}}}" in (DEPLOY / "compose.yaml").read_text()
    images = re.findall(r"image: (\S+)", chart.PLAIN.read_text())
    assert set(images) == {f"kept:{kept.__version__}"}
