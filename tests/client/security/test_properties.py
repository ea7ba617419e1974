"""Java's .properties grammar; what is expected was printed by java.util.Properties (Java 17)."""

from __future__ import annotations

import pytest

from kept.client.security.properties import parse_properties, read_properties
from kept.storage.errors import ConfigurationError

CASES = [
    ("a=b", {"a": "b"}),
    ("a = b ", {"a": "b "}),
    ("a:b\nc d\ne\tf", {"a": "b", "c": "d", "e": "f"}),
    ("a==b", {"a": "=b"}),
    ("a : = b", {"a": "= b"}),
    ("  \t# no\n! no\n\n \na=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
    ("a=b\\\n    c\\\n\td", {"a": "bcd"}),
    ("a=b\\\\\nc=d", {"a": "b\\", "c": "d"}),
    ("a=b\\", {"a": "b"}),
    ("a=b\\\n# not a comment", {"a": "b# not a comment"}),
    ("\\\na=b", {"a": "b"}),
    ("a\\=b\\:c\\ d=e", {"a=b:c d": "e"}),
    ('k=\\t\\n\\r\\f\\q\\"\\\\', {"k": '\t\n\r\fq"\\'}),
    ("k=\\u0041\\u00e9\\ud83d\\ude00", {"k": "Aé😀"}),
    ("only", {"only": ""}),
    ("=v", {"": "v"}),
    ("a=1\na=2", {"a": "2"}),
    ('j=X required u="a" \\\n  password="b=c";', {"j": 'X required u="a" password="b=c";'}),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_what_java_reads(text, expected):
    assert parse_properties(text, "f") == expected


@pytest.mark.parametrize("text", ["ok=1\n\nsecret=\\u12G4", "ok=1\n\nsecret=\\u12"])
def test_a_broken_escape_is_told_by_its_line_and_not_by_its_value(text):
    with pytest.raises(ConfigurationError, match="f: line 3: after ") as caught:
        parse_properties(text, "f")
    assert "secret" not in str(caught.value)


def test_files_are_utf_8_or_else_latin_1(tmp_path):
    file = tmp_path / "client.properties"
    for data in ("password=grün".encode(), "password=grün".encode("latin-1")):
        file.write_bytes(data)
        assert read_properties(str(file)) == {"password": "grün"}
    with pytest.raises(ConfigurationError, match="missing: No such file"):
        read_properties(str(tmp_path / "missing"))
    file.write_bytes(bytes(2 << 20))
    with pytest.raises(ConfigurationError, match="not properties"):
        read_properties(str(file))
