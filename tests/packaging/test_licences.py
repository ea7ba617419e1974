"""Whoever installs kept installs these licences with it."""

from __future__ import annotations

import importlib.metadata
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ALLOWED = re.compile(r"\b(Apache|MIT|BSD|PSF|Python Software Foundation|ISC|MPL)\b")
LIBRARIES = {"crc32c": "LGPL-2.1-or-later"}
"""Copyleft that ends at the library: it is installed as it is, beside kept."""


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """What a package says: an SPDX expression, or a text and classifiers as older ones do."""
    expression = metadata.get("License-Expression")
    if expression is not None:
        return expression
    classifiers = metadata.get_all("Classifier") or []
    told = [x for x in classifiers if x.startswith("License ::")]
    return " | ".join([(metadata.get("License") or "").split("\n")[0], *told])


def installed_with(name: str) -> dict[str, str]:
    """Licences of a package and of all that it requires here, without extras."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        package = canonicalize_name(waiting.pop())
        if package in found:
            continue
        distribution = importlib.metadata.distribution(package)
        found[package] = licence_of(distribution.metadata)
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def test_what_is_installed_with_kept_may_be_used_and_passed_on():
    found = installed_with("kept-log")
    assert len(found) > 15 and found.pop("kept-log") == "Apache-2.0"
    for package, licence in LIBRARIES.items():
        assert licence in found.pop(package)
    for package, licence in found.items():
        assert ALLOWED.search(licence) and not re.search(r"GPL|General Public", licence), (
            f"{package}: {licence}"
        )
