"""Nothing in the console's scripts and styles that nothing uses."""

from __future__ import annotations

import re

from kept.node.http import console


def code_of(name: str) -> str:
    """A file without its comments."""
    return re.sub(r"(?m)//.*$|/\*[\s\S]*?\*/", "", console.text(name))


SCRIPTS = {name: code_of(name) for name in console.TYPES if name.endswith(".js")}
MARKUP = "\n".join([*SCRIPTS.values(), console.text("page.html")])
DEFINED = r"(?m)^(export )?(?:async )?(?:function\*?|const|let|class) ([\w$]+)"


def uses(name: str, text: str, letters: str = "$") -> int:
    """How often a name of letters, digits, ``_`` and these ``letters`` is in a text."""
    return len(re.findall(rf"(?<![\w{letters}]){re.escape(name)}(?![\w{letters}])", text))


def test_scripts_define_export_and_import_what_is_used():
    assert len(SCRIPTS) > 10
    idle = []
    for script, code in SCRIPTS.items():
        for exported, name in re.findall(DEFINED, code):
            inside, everywhere = uses(name, code), uses(name, MARKUP)
            if everywhere == 1 or (exported and everywhere == inside):
                idle.append((script, name))
        for names in re.findall(r"import \{([^}]*)\}", code):
            given = [name.split(" as ")[-1].strip() for name in names.split(",")]
            idle += [(script, name) for name in given if name and uses(name, code) == 1]
    assert idle == []


def test_styles_are_of_classes_ids_and_colours_that_there_are():
    style = code_of("page.css")
    selectors = re.sub(r"\{[^{}]*\}", "{}", style)
    named = set(re.findall(r"[.#](-?[A-Za-z_][\w-]*)", selectors))
    assert len(named) > 30
    assert [name for name in sorted(named) if not uses(name, MARKUP, "-")] == []
    colours = set(re.findall(r"(--[\w-]+)\s*:", style))
    assert [name for name in sorted(colours) if f"var({name})" not in style + MARKUP] == []
