"""Distinguished names as Java writes them, and the principals that rules make of them.

What is expected of names was recorded with ``new X500Principal(der).getName()`` of OpenJDK 17; what
is expected of rules are the cases of Kafka's ``SslPrincipalMapperTest``.
"""

from __future__ import annotations

import pytest

from kept.client.security.distinguished_names import PrincipalMapper, distinguished_name
from kept.storage.errors import ConfigurationError

UTF8, PRINTABLE, T61, IA5, BMP, INTEGER = 0x0C, 0x13, 0x14, 0x16, 0x1E, 0x02
CN, C, L, ST, STREET, O, OU = (f"2.5.4.{i}" for i in (3, 6, 7, 8, 9, 10, 11))  # noqa: E741
DC, UID = "0.9.2342.19200300.100.1.25", "0.9.2342.19200300.100.1.1"
EMAIL, SERIAL, TITLE = "1.2.840.113549.1.9.1", "2.5.4.5", "2.5.4.12"


def tlv(tag: int, value: bytes) -> bytes:
    size = len(value)
    length = bytes([size]) if size < 128 else b"\x82" + size.to_bytes(2, "big")
    return bytes([tag]) + length + value


def oid(text: str) -> bytes:
    first, second, *rest = map(int, text.split("."))
    encoded = b""
    for number in (40 * first + second, *rest):
        groups = [number & 0x7F]
        while number := number >> 7:
            groups.insert(0, number & 0x7F | 0x80)
        encoded += bytes(groups)
    return tlv(0x06, encoded)


def der(*parts: list[tuple[str, int, bytes]]) -> bytes:
    sets = [
        b"".join(tlv(0x30, oid(name) + tlv(tag, value)) for name, tag, value in part)
        for part in parts
    ]
    return tlv(0x30, b"".join(tlv(0x31, one) for one in sets))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            der(
                [(C, PRINTABLE, b"DE")],
                [(ST, UTF8, b"Berlin")],
                [(L, UTF8, b"B")],
                [(O, UTF8, b"Acme")],
                [(OU, UTF8, b"dev")],
                [(STREET, UTF8, b"s1")],
                [(DC, IA5, b"example")],
                [(UID, UTF8, b"u1")],
                [(CN, UTF8, b"ada")],
            ),
            "CN=ada,UID=u1,DC=example,STREET=s1,OU=dev,O=Acme,L=B,ST=Berlin,C=DE",
        ),
        (
            der([(EMAIL, IA5, b"a@b.c")], [(SERIAL, PRINTABLE, b"123")], [(TITLE, UTF8, b"Dr")]),
            "2.5.4.12=#0c024472,2.5.4.5=#1303313233,1.2.840.113549.1.9.1=#16056140622e63",
        ),
        (der([(CN, UTF8, b'a,b=c+d<e>f#g;h"i\\j')]), 'CN=a\\,b\\=c\\+d\\<e\\>f\\#g\\;h\\"i\\\\j'),
        (der([(CN, UTF8, b"  a b  ")], [(O, UTF8, b"#x")]), "O=\\#x,CN=\\ \\ a b\\ \\ "),
        (der([(CN, UTF8, b"   ")]), "CN=\\ \\ \\ "),
        (der([(CN, UTF8, b"\rab\r")]), "CN=\\\rab\\\r"),
        (der([(CN, UTF8, b"admin\0.evil")]), "CN=admin\\00.evil"),
        (der([(CN, UTF8, "Łódź аdmin".encode())]), "CN=Łódź аdmin"),
        (der([(CN, BMP, "ada".encode("utf-16-be"))]), "CN=\\00a\\00d\\00a"),
        (der([(CN, T61, b"\xe4da")]), "CN=\ufffdda"),
        (der([(CN, UTF8, b"ada"), (OU, UTF8, b"dev")], [(O, UTF8, b"A")]), "O=A,CN=ada+OU=dev"),
        (der([(CN, INTEGER, b"\x05")]), "CN=#020105"),
        (
            der([(CN, UTF8, b"User:admin")], [(O, UTF8, b"x,CN=admin")]),
            "O=x\\,CN\\=admin,CN=User:admin",
        ),
        (der([(CN, UTF8, b"")]), "CN="),
        (der(), ""),
    ],
)
def test_a_name_is_written_as_java_writes_it(name: bytes, text: str) -> None:
    assert distinguished_name(name) == text


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"\x30",
        b"\x30\x05\x31",
        b"\x31\x00",
        b"\x30\x84\xff\xff\xff\xff",
        b"\x30\x80\x00\x00",
        tlv(0x30, tlv(0x30, b"")),
        tlv(0x30, tlv(0x31, tlv(0x30, oid(CN)))),
        tlv(0x30, tlv(0x31, tlv(0x30, tlv(0x06, b"\xff" * 20) + tlv(UTF8, b"x")))),
        tlv(0x30, tlv(0x31, tlv(0x30, tlv(0x06, b"\x80") + tlv(UTF8, b"x")))),
        der(*[[(CN, UTF8, b"x")]] * 65),
        der([(CN, UTF8, b"x" * 5000)]),
    ],
)
def test_what_is_no_name_is_refused(name: bytes) -> None:
    with pytest.raises(ValueError):
        distinguished_name(name)


DUKE = "CN=Duke,OU=ServiceUsers,O=Org,C=US"
RULES = (
    r"RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L,"
    r" RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L,"
    r"RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U,DEFAULT"
)


@pytest.mark.parametrize(
    ("rules", "name", "principal"),
    [
        ("DEFAULT", DUKE, DUKE),
        (RULES, DUKE, "duke"),
        (RULES, "CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US", "duke@sme"),
        (RULES, "cn=kafka1,o=x,dc=y", "KAFKA1"),
        (RULES, "OU=JavaSoft,O=Sun", "OU=JavaSoft,O=Sun"),
        (r"RULE:^CN=(.*?),.*$/$1/", DUKE, "Duke"),
        (r"RULE:^CN=(.*?)(,.*)?$/$10/", DUKE, "Duke0"),
        (r"RULE:^CN=(.*?),.*$/\$1$2\//", DUKE, "$1$2/"),
        (r"RULE:^CN=.*$/node/", DUKE, "node"),
        (r"RULE:.*/x/", DUKE, "xx"),
        (r"RULE:^CN=(\w+)\/.*$/$1/", "CN=ada/x", "ada"),
        (
            r"RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U",
            "cn=duke,ou=sme,dc=mycp,dc=com",
            "DUKE@SME",
        ),
        # Letters and commas of a class are neither ends of rules nor their names.
        (r"RULE:^CN=([^,ADEFLTU,]+)(,.*|$)/$1/", "CN=duke,O=x", "duke"),
        (r"RULE:^CN=([^,DEFAULT,]+)(,.*|$)/$1/", "CN=duke,O=x", "duke"),
        (
            r"RULE:^CN=((\\, *|\w)+)(,.*|$)/$1/,DEFAULT",
            r"CN=Tkac\, Adam,OU=ITZ,DC=geodis,DC=cz",
            r"Tkac\, Adam",
        ),
        (r"  RULE:([A-Z]*)/$1/L   ,RULE:([a-z]+)/$1/,   DEFAULT  ", "ABC", "abc"),
        (r"  RULE:([A-Z]*)/$1/L   ,RULE:([a-z]+)/$1/,   DEFAULT  ", "A1", "A1"),
    ],
)
def test_rules_name_the_principal(rules: str, name: str, principal: str) -> None:
    assert PrincipalMapper(rules).name(name) == principal


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (r"RULE:^CN=(.*?),OU=x$/$1/", DUKE),
        (r"RULE:CN=Duke/$0/", DUKE),
        (r"RULE:^CN=(.*)$/$1/", "CN=a\nb"),
        (r"RULE:^CN=(.*)$/$1/", "CN=a\u2028b"),
        (r"RULE:^CN=(.*)$/$1/", "CN="),
    ],
)
def test_whom_no_rule_names(rules: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"no rule|empty name"):
        PrincipalMapper(rules).name(name)


@pytest.mark.parametrize(
    "rules",
    [
        "",
        "default",
        "DEFAUL",
        "DEFAULT/L",
        "DEFAULT/",
        "RULE",
        "RULE:",
        "RULE:/",
        "RULE:a/",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/LU",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L/U",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/L",
        "RULE:CN=(.*?),OU=ServiceUsers.*/$1",
        "rule:^CN=(.*?),OU=ServiceUsers.*$/$1/",
        "RULE:a/b/, c",
        "RULE:[/x/",
        r"RULE:\Qa\E/x/",
        r"RULE:[a&&b]/x/",
        r"RULE:[a[bc]]/x/",
        r"RULE:(?<n>a)/x/",
        r"RULE:a{,3}/x/",
        r"RULE:a\Z/x/",
        r"RULE:\p{L}/x/",
        r"RULE:(?x)a b/x/",
        r"RULE:[a--b]/x/",
    ],
)
def test_rules_that_are_none_or_mean_something_else_in_java_are_refused(rules: str) -> None:
    with pytest.raises(ConfigurationError, match=r"ssl\.principal\.mapping\.rules"):
        PrincipalMapper(rules)
