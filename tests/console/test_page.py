"""The console's files: what a browser gets, what it may do, and that people can read it."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest

from kept.node.http import console


def get(broker, path, accept="text/html,*/*"):
    request = urllib.request.Request(broker.url() + path, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers, answer.read().decode()


def test_a_browser_gets_the_page_and_curl_the_list(kept_broker):
    headers, page = get(kept_broker, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    headers, listed = get(kept_broker, "/", accept="*/*")
    assert headers["Content-Type"] == "text/plain; charset=utf-8" and "/api/v1/topics" in listed
    for path in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        headers, text = get(kept_broker, path)
        name = path.rpartition("/")[2]
        assert (headers["Content-Type"], text) == (console.TYPES[name], console.text(name))


def test_nothing_but_this_nodes_own_may_run(kept_broker):
    for path in ("/", "/console/page.js", "/console/page.css"):
        headers, _ = get(kept_broker, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert headers["X-Frame-Options"] == "DENY", "of browsers that know no frame-ancestors"
    page = console.text("page.html")
    assert "<style" not in page and not re.search(r"\son\w+=", page)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    script = "".join(console.text(name) for name in console.TYPES if name.endswith(".js"))
    made = r"\.(inner|outer)HTML\s*=[^=]|insertAdjacent|document\.write|eval\(|new Function|srcdoc"
    assert not re.search(made, script)
    foreign = re.findall(r"https?://[^\s\"']+", page + script + console.text("page.css"))
    assert set(foreign) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "style=" not in page + script


def test_the_parts_that_a_page_imports_are_served(kept_broker):
    for name, kind in console.TYPES.items():
        for imported in re.findall(r'from "\./([^"]+)"', console.text(name)):
            assert imported in console.TYPES, (name, imported)
        headers, text = get(kept_broker, f"/console/{name}")
        assert (headers["Content-Type"], text) == (kind, console.text(name))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(kept_broker, "/console/__init__.py")


# WCAG 2.2, 1.4.3 and 1.4.11.

TEXT, DRAWING = 4.5, 3.0
ON = {
    "text": ("back", "card"),
    "quiet": ("back", "card"),
    "link": ("back", "card"),
    "bad": ("back", "card"),
    "good": ("back", "card"),
    "on-button": ("link", "bad"),
}
DRAWN = ("clean", "dirty", "active", "closed", "cleaner")


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_wcag_aa_in_light_and_dark():
    assert round(contrast("#000000", "#ffffff"), 1) == 21
    blocks = re.findall(r":root \{(.*?)\}", console.text("page.css"), re.DOTALL)
    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks]
    assert len(themes) == 2 and themes[0].keys() == themes[1].keys()
    for colors in themes:
        for name, grounds in ON.items():
            for ground in grounds:
                assert contrast(colors[name], colors[ground]) >= TEXT, (name, ground, colors)
        for name in DRAWN:
            assert contrast(colors[name], colors["back"]) >= DRAWING, (name, colors)
