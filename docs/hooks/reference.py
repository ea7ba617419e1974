"""The pages of the reference that are made from the code while the site is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from mkdocs.structure.files import File, Files

from kept.cli.root import kept
from kept.node.metrics.definitions import TABLE

OPENAPI = "openapi.yaml"


def on_files(files: Files, config: Any) -> Files:
    """``files`` with the generated pages."""
    openapi = yaml.safe_load((Path(config.docs_dir) / OPENAPI).read_text(encoding="utf-8"))
    pages = {
        "reference/commands.md": _commands(),
        "reference/metrics.md": _metrics(),
        "reference/http-api.md": _operations(openapi),
        "adr/README.md": _decisions(Path(config.docs_dir) / "adr"),
    }
    for uri, lines in pages.items():
        files.append(File.generated(config, uri, content="\n".join(lines) + "\n"))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """``html`` without the roles of docstrings (``:class:``), whose names are code already."""
    return re.sub(r":(?:mod|class|func|meth|attr|data):(?=<code>)", "", html)


def _commands() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield "Every command with its options, as `--help` shows them."
    yield "Exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C, 143 TERM."
    yield ""
    context = click.Context(kept, info_name="kept")
    for name in kept.list_commands(context):
        command = kept.get_command(context, name)
        assert command is not None
        yield from _command(command, context, name, level=2)


def _command(command: click.Command, parent: click.Context, name: str, level: int) -> Iterator[str]:
    context = click.Context(command, parent=parent, info_name=name)
    yield f"{'#' * level} {context.command_path}"
    yield ""
    yield from _paragraphs(command.help)
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from _command(found, context, child, level + 1)
        return
    yield "```"
    yield f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}"
    yield "```"
    yield ""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in record[0]:
            yield f"- `{record[0]}`{': ' if record[1] else ''}{_escaped(record[1])}"
    yield ""
    if command.epilog:
        yield "```console"
        yield from (
            f"$ {line.strip()}"
            for line in re.sub(r" \\\n +", " ", command.epilog.replace("\b", "")).splitlines()
            if line.startswith("  ")
        )
        yield "```"
        yield ""


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in (text or "").split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```", paragraph.lstrip("\b\n"), "```")
        else:
            yield _escaped(" ".join(paragraph.split()))
        yield ""


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _decisions(folder: Path) -> Iterator[str]:
    yield "# Decisions"
    yield ""
    yield "What was decided, why, and what it costs. A decision that no longer holds is superseded"
    yield "by a later one, and stays."
    yield ""
    for page in sorted(folder.glob("0*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        yield f"- [{title}]({page.name})"


def _metrics() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "`http://HOST:PORT/metrics`, on the port of the clients."
    yield "[Running a node](../operations.md#what-to-watch) says when to raise an alarm."
    yield ""
    for row in TABLE:
        suffix = "_total" if row.kind == "counter" else ""
        labels = f"{{{', '.join(row.labels)}}}" if row.labels else ""
        yield f"- `kept_{row.name}{suffix}{labels}` ({row.kind}): {_escaped(row.help)}"
    yield ""


def _operations(openapi: dict[str, Any]) -> Iterator[str]:
    yield "# HTTP API"
    yield ""
    yield openapi["info"]["description"]
    yield f"The document: [{OPENAPI}](../{OPENAPI}) (OpenAPI {openapi['openapi']})."
    yield ""
    yield "## Logins"
    yield ""
    for name, scheme in openapi["components"]["securitySchemes"].items():
        yield _item(name, scheme.get("scheme", ""), scheme["description"])
    yield ""
    for tag in openapi["tags"]:
        yield f"## {tag['name'].capitalize()}"
        yield ""
        yield tag["description"]
        yield ""
        for path, methods in openapi["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation.get("tags", ()):
                    yield from _operation(openapi, f"{method.upper()} {path}", operation)


def _operation(openapi: dict[str, Any], title: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"### {title}"
    yield ""
    yield operation["summary"]
    if "description" in operation:
        yield ""
        yield operation["description"]
    yield ""
    for given in operation.get("parameters", ()):
        parameter = _resolved(openapi, given)
        schema = _resolved(openapi, parameter["schema"])
        details = [str(schema.get("type", ""))]
        if parameter.get("required"):
            details.append("required")
        if "default" in schema:
            details.append(f"default {schema['default']}")
        text = parameter.get("description") or schema.get("description")
        yield _item(parameter["name"], ", ".join(filter(None, details)), text)
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if body:
        yield from _fields("Body", openapi, body["schema"])
    for status, given in operation["responses"].items():
        response = _resolved(openapi, given)
        schema = response.get("content", {}).get("application/json", {}).get("schema")
        if status == "200" and schema:
            yield from _fields("Answer", openapi, schema)
    yield ""


def _fields(heading: str, openapi: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    schema = _resolved(openapi, given)
    if schema.get("type") == "array":
        heading = f"{heading}: a list of"
        schema = _resolved(openapi, schema["items"])
    if "properties" not in schema:
        return
    yield ""
    yield f"**{heading}**"
    yield ""
    for name, given_field in schema["properties"].items():
        field = _resolved(openapi, given_field)
        kind = field.get("type", "")
        kind = " or ".join(kind) if isinstance(kind, list) else kind
        yield _item(name, kind, given_field.get("description") or field.get("description"))


def _item(name: str, kind: str, text: str | None) -> str:
    details = f" ({kind})" if kind else ""
    return f"- `{name}`{details}" + (f": {' '.join(text.split())}" if text else "")


def _resolved(openapi: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in given:
        found: Any = openapi
        for part in given["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        given = found
    return given
