"""``kept context``, and which cluster a command goes to."""

from __future__ import annotations

import json
import stat

import pytest

from kept.cli.context_file import Context, Contexts, path_of, read_contexts, resolve, write_contexts
from kept.cli.shell import Failure


@pytest.fixture
def home(tmp_path, offline, monkeypatch):
    """A user with no contexts yet, and nothing in the environment that decides."""
    offline.environ |= {"XDG_CONFIG_HOME": str(tmp_path)}
    del offline.environ["KEPT_BOOTSTRAP"]
    return tmp_path / "kept" / "contexts.yaml"


def where(offline, *arguments, **more) -> tuple[str | None, str]:
    shown = offline("context", "show", "--json", *arguments, **more).json
    return shown["context"], shown["bootstrap"]


def test_contexts_come_and_go(offline, home):
    assert where(offline) == (None, "localhost:9092")
    said = offline("context", "add", "staging", "--bootstrap", "a:1,b:2").out
    assert said == "added context staging, which is the current one\n"
    assert offline("context", "add", "prod", "--bootstrap", "p:9092").out == "added context prod\n"
    assert where(offline) == ("staging", "a:1,b:2")
    assert offline("context", "use", "prod").out == "commands go to prod, at p:9092\n"
    assert where(offline) == ("prod", "p:9092")
    assert where(offline, "staging") == ("staging", "a:1,b:2")
    assert [line.split() for line in offline("context", "list").lines] == [
        ["NAME", "BOOTSTRAP", "COMMAND", "CONFIG"],
        ["*", "prod", "p:9092", "-"],
        ["staging", "a:1,b:2", "-"],
    ]
    assert [row["name"] for row in offline("context", "list", "--json").json] == ["prod", "staging"]
    assert offline("context", "add", "prod", "--bootstrap", "q:1").out.startswith("replaced")
    ran = offline("context", "remove", "prod", "nope", "staging", status=1)
    assert "removed context prod; there is no current one now" in ran.out
    assert "kept: nope: there is no context nope; contexts: staging" in ran.err
    assert where(offline) == (None, "localhost:9092")


def test_commands_go_there(offline, home, kept_broker):
    topic = kept_broker.create_topic()
    offline("context", "add", "test", "--bootstrap", kept_broker.bootstrap)
    assert topic in offline("topic", "list").out
    offline("context", "add", "nobody", "--bootstrap", "localhost:1")
    offline("context", "use", "nobody")
    assert "localhost:1" in offline("topic", "list", status=1).err
    assert topic in offline("topic", "list", "--context", "test").out
    offline.environ["KEPT_CONTEXT"] = "test"
    assert topic in offline("topic", "list").out
    assert "localhost:1" in offline("topic", "list", "--context", "nobody", status=1).err


def test_what_decides(tmp_path):
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    contexts = {"a": Context("a:1", "/a.properties"), "b": Context("b:1")}
    write_contexts(path_of(environ), Contexts("a", contexts))

    def told(bootstrap=None, context=None, config=None, **more):
        target = resolve(bootstrap, context, config, environ | more)
        return target.bootstrap, target.command_config, target.context

    everything = {"KEPT_BOOTSTRAP": "e:1", "KEPT_CONTEXT": "b", "KEPT_COMMAND_CONFIG": "/e"}
    assert told("o:1", **everything) == ("o:1", "/e", None)
    assert told(context="a", **everything) == ("a:1", "/a.properties", "a")
    assert told(context="b", **everything) == ("b:1", "/e", "b")
    assert told(**everything) == ("e:1", "/e", None)
    assert told(KEPT_CONTEXT="b") == ("b:1", "", "b")
    assert told() == ("a:1", "/a.properties", "a")
    assert told(config="/o") == ("a:1", "/o", "a")
    assert resolve(None, None, None, {"XDG_CONFIG_HOME": str(tmp_path / "x")}).source == "default"


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("arguments", "environ", "status", "said"),
    [
        (["context", "add", "a b", "--bootstrap", "x:1"], {}, 2, "'a b' is no name of a context"),
        (["context", "add", "a", "--bootstrap", "x:y"], {}, 2, "'x:y' is not host:port"),
        (["context", "add", "a", "--bootstrap", "x:1", "--command-config", "nope"], {}, 2, "nope"),
        (["context", "use", "prot"], {}, 1, "no context prot; did you mean prod?"),
        (["topic", "list", "--context", "nope"], {}, 1, "no context nope"),
        (["topic", "list", "--context", "prod", "--bootstrap", "x:1"], {}, 2, "contradict"),
        (["topic", "list"], {"KEPT_CONTEXT": "nope"}, 1, "no context nope"),
        (["topic", "list"], {"KEPT_BOOTSTRAP": "x:y"}, 2, "$KEPT_BOOTSTRAP: 'x:y' is not"),
    ],
)
def test_what_is_wrong_is_named(offline, arguments, environ, status, said):
    offline("context", "add", "prod", "--bootstrap", "localhost:1")
    offline.environ |= environ
    assert said in offline(*arguments, status=status).err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("contexts: " + "[" * 5000, "nested too deeply"),
        ("contexts: [a]\n", "Expected `object`"),
        ("contexts: {a: {bootstrap: 3}}\n", "$.contexts[...].bootstrap"),
        ("contexts: {a: {bootstrp: 'x:1'}}\n", "bootstrp"),
        ("\t", "is not YAML"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path, text, said):
    path = tmp_path / "contexts.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Failure) as raised:
        read_contexts(str(path))
    assert str(path) in str(raised.value) and said in str(raised.value)


def test_a_current_context_that_is_gone_is_replaced_by_use(offline, home):
    home.parent.mkdir()
    home.write_text("current: gone\ncontexts: {b: {bootstrap: 'b:1'}}\n")
    said = offline("topic", "list", status=1).err
    assert f"current of {home}: there is no context gone; contexts: b" in said
    assert where(offline, "b") == ("b", "b:1")
    assert "localhost:1" in offline("topic", "list", "--bootstrap", "localhost:1", status=1).err
    assert offline("context", "list").lines[1].split() == ["b", "b:1", "-"]
    offline.environ["KEPT_CONTEXT"] = "b"
    assert where(offline) == ("b", "b:1")
    del offline.environ["KEPT_CONTEXT"]
    offline("context", "use", "b")
    assert where(offline) == ("b", "b:1")


def test_without_contexts_none_is_there_to_choose(offline, home):
    home.parent.mkdir()
    home.write_text("current: gone\n")
    said = "there is no context gone: none is defined; kept context add makes one"
    assert said in offline("topic", "list", status=1).err
    said = offline("context", "add", "b", "--bootstrap", "b:1").out
    assert said == "added context b, which is the current one\n"


@pytest.mark.parametrize("option", ["--context", "--command-config"])
@pytest.mark.usefixtures("home")
def test_an_unset_variable_chooses_no_cluster(offline, option):
    offline("context", "add", "prod", "--bootstrap", "localhost:1")
    assert f"{option} is empty" in offline("topic", "delete", "users", option, "", status=2).err


def test_a_command_config_is_read_when_it_is_added(offline, home, tmp_path):
    config = tmp_path / "ada.properties"
    config.write_text("security.protocol=NONSENSE\n")
    ran = offline("context", "add", "a", "--bootstrap", "x:1", "--command-config", config, status=1)
    assert "NONSENSE" in ran.err and str(config) in ran.err
    config.write_text("security.protocol=PLAINTEXT\n")
    add = ("context", "add", "a", "--bootstrap", "x:1", "--command-config", "ada.properties")
    offline(*add, cwd=tmp_path)
    assert json.loads(offline("context", "show", "--json").out)["command_config"] == str(config)
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o700
