"""Write the zone of this pod's Kubernetes node (NODE_NAME) into a file, for ``broker.rack``."""

import json
import os
import ssl
import sys
import urllib.request

HERE = "/var/run/secrets/node-reader"
LABEL = "topology.kubernetes.io/zone"
node = os.environ["NODE_NAME"]
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
host = f"[{host}]" if ":" in host else host
with open(f"{HERE}/token") as token:
    request = urllib.request.Request(
        f"https://{host}:{port}/api/v1/nodes/{node}",
        headers={"Authorization": f"Bearer {token.read().strip()}"},
    )
trust = ssl.create_default_context(cafile=f"{HERE}/ca.crt")
with urllib.request.urlopen(request, context=trust, timeout=20) as answer:
    zone = json.load(answer)["metadata"].get("labels", {}).get(LABEL, "")
print(f"{node}: zone {zone or 'unknown, the node has no label ' + LABEL}", file=sys.stderr)
with open("/run/kept/rack", "w") as rack:
    rack.write(zone)
