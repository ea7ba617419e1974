"""Refuse to take needed nodes away: ``scale_down.py upgrade|rollback REPLICAS BOOTSTRAP``.

Without an answer an upgrade is refused, and a rollback goes on: it is what mends nodes that do not
answer. A node that it takes away keeps its volume, and is back with it once ``replicas`` is raised.
While no controller answers nobody knows who votes: that is no answer where a node would go.
"""

import json
import subprocess
import sys
from typing import NoReturn

WITHOUT = {"upgrade": "--set scaleDownCheck=false", "rollback": "--no-hooks"}

step, replicas, bootstrap = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def end_without(said: str) -> NoReturn:
    """Nobody answers, or not what is to be known: ends the script."""
    unknown = f"{said}\nWithout an answer it is not known what the nodes from {replicas} on hold."
    if step == "rollback":
        print(f"{unknown} The rollback goes on: volumes stay", file=sys.stderr)
        sys.exit(0)
    sys.exit(f"{unknown} If none is taken away, go on with helm {step} {WITHOUT[step]}")


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
    end_without(said.strip())
found = json.loads(asked.stdout)
goes = [node["node_id"] for node in found["nodes"] if node["node_id"] >= replicas]
if goes and found.get("quorum_unknown") is not None:
    end_without(f"no controller answers ({found['quorum_unknown']})")
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
    if step == "rollback":  # helm 3 notes it before its hooks run, and no end of it where they fail
        wrong.append(
            "helm takes this rollback to be still going on, and refuses every upgrade: end it with "
            "helm rollback RELEASE N, where N is the revision that helm history calls deployed"
        )
    sys.exit("\n".join([f"replicas={replicas} would take nodes away that are needed:", *wrong]))
