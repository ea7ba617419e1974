"""Refuse to take needed nodes away: ``scale_down.py upgrade|rollback REPLICAS BOOTSTRAP``.

Without an answer an upgrade is refused, and a rollback goes on: it is what mends nodes that do not
answer. A node that it takes away keeps its volume, and is back with it once ``replicas`` is raised.
"""

import json
import subprocess
import sys

WITHOUT = {"upgrade": "--set scaleDownCheck=false", "rollback": "--no-hooks"}

step, replicas, bootstrap = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    asked = subprocess.run(
        ["kept", "cluster", "status", "--json", "--bootstrap", bootstrap],
        capture_output=True,
        text=True,
        timeout=45,
        check=True,
    )
except subprocess.SubprocessError as error:  # it failed, or took too long
    said = getattr(error, "stderr", None) or str(error)
    if isinstance(said, bytes):  # so it is in TimeoutExpired, whatever was asked for
        said = said.decode(errors="replace")
    said = said.strip()
    unknown = f"{said}\nWithout an answer it is not known what the nodes from {replicas} on hold."
    if step == "rollback":
        print(f"{unknown} The rollback goes on: volumes stay", file=sys.stderr)
        sys.exit(0)
    sys.exit(f"{unknown} If none is taken away, go on with helm {step} {WITHOUT[step]}")
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
    wrong.append(f"or go on without this check: helm {step} {WITHOUT[step]}")
    sys.exit("\n".join([f"replicas={replicas} would take nodes away that are needed:", *wrong]))
