"""Refuse to take needed nodes away: ``scale_down.py REPLICAS BOOTSTRAP``."""

import json
import subprocess
import sys

replicas, bootstrap = int(sys.argv[1]), sys.argv[2]
asked = subprocess.run(
    ["kept", "cluster", "status", "--json", "--bootstrap", bootstrap],
    capture_output=True,
    text=True,
    timeout=90,
    check=False,
)
if asked.returncode:
    sys.exit(
        f"{asked.stderr.strip()}\nWithout an answer it is not known what the nodes from {replicas} "
        "on hold. If none is taken away, go on with --set scaleDownCheck=false"
    )
found = json.loads(asked.stdout)
wrong = []
for node in found["nodes"]:
    number = node["node_id"]
    if number < replicas:
        continue
    if node["replicas"]:
        held = node["replicas"]
        wrong.append(f"node {number} holds {held} replicas: kept cluster drain {number} --wait")
    if number in found["voters"]:
        wrong.append(f"node {number} votes: kept cluster voter remove {number}")
if wrong:
    sys.exit("\n".join([f"replicas={replicas} would take nodes away that are needed:", *wrong]))
