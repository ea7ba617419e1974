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
wrong, full, voting = [], [], []
for node in found["nodes"]:
    number = node["node_id"]
    if number < replicas:
        continue
    if node["replicas"]:
        wrong.append(f"node {number} holds {node['replicas']} replicas")
        full.append(number)
    if number in found["voters"]:
        wrong.append(f"node {number} votes")
        voting.append(number)
if full:
    wrong.append(f"kept cluster drain {' '.join(map(str, full))} --wait")
wrong += [f"kept cluster voter remove {number}" for number in voting]
if wrong:
    sys.exit("\n".join([f"replicas={replicas} would take nodes away that are needed:", *wrong]))
