"""The directory of a job: Parquet, and small files beside it, wherever Spark's paths lead.

Spark reads and writes the data; a job's own notes (what was exported, how far a table goes) are a
file of text, replaced as a whole, through Hadoop's FileSystem. On a local disk that file is written
without Hadoop, which keeps a checksum in another file beside it: a driver that was killed between
the two would leave a note that cannot be read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kept.pipeline.connection import BadOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


BEGUN: Final = "_begun"
"""Made by the first of two who begin to write at once."""


class JobDirectory:
    """One directory, local or of any file system that the session knows.

    What Hadoop refuses is a Py4JError, what a local disk refuses an OSError.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        if not path:
            raise BadOption("the name of the directory is empty")
        self.path = path.rstrip("/") or "/"
        self._spark = spark
        self._jvm: Any = spark._jvm
        self._gateway: Any = spark.sparkContext._gateway
        self._conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs: Any = self._path("").getFileSystem(self._conf)
        self._local: bool = self._fs.getUri().getScheme() == "file"

    def at(self, name: str) -> str:
        """The path of a member, as Spark takes it to write."""
        return f"{self.path}/{name}" if name else self.path

    def rows(self, name: str, schema: str | None = None) -> DataFrame:
        """A member that is Parquet. To read, Spark takes patterns: the path is none."""
        reader = self._spark.read if schema is None else self._spark.read.schema(schema)
        literal = re.sub(r"([][{}*?\\])", r"\\\1", self.at(name))
        return reader.parquet(literal)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.at(name))

    def _file(self, name: str) -> Path:
        """A member of a local directory."""
        return Path(str(self._fs.makeQualified(self._path(name)).toUri().getPath()))

    def names(self) -> list[str]:
        """The members; none where there is no directory."""
        root = self._path("")
        if not self._fs.exists(root):
            return []
        return [status.getPath().getName() for status in self._fs.listStatus(root)]

    def read(self, name: str) -> str | None:
        """A file of text; None where there is none."""
        if self._local:
            try:
                return self._file(name).read_text("utf-8")
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not self._fs.exists(self._path(name)):
            return None
        stream = self._fs.open(self._path(name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def note(self, name: str, form: int, has: str, what: str) -> dict[str, Any] | None:
        """A file of JSON with the number of its format and a member ``has``; None where there is
        none. Raises BadOption for one that is not ``what`` it should be.
        """
        text = self.read(name)
        if text is None:
            return None
        try:
            said = json.loads(text)
        except ValueError as error:
            raise BadOption(f"{self.path}: {name} is damaged: {error}") from None
        if not isinstance(said, dict) or "format" not in said:
            raise BadOption(f"{self.path} is {what} of nothing: {name} is not kept's")
        if said["format"] != form:
            raise BadOption(f"{self.path}: {name} has format {said['format']}, not {form}")
        if has not in said:
            raise BadOption(f"{self.path} holds something else than {what}: {name} says so")
        return said

    def replace(self, name: str, text: str) -> None:
        """Put ``text`` where that file was, at once."""
        if self._local:
            _replace(self._file(name), text)
            return
        draft = self._path(_draft(name))
        stream = self._fs.create(draft, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        rename = self._jvm.org.apache.hadoop.fs.Options.Rename
        how = self._gateway.new_array(rename, 1)
        how[0] = rename.OVERWRITE
        uri = self._fs.getUri()
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(uri, self._conf)
        context.rename(self._fs.makeQualified(draft), self._fs.makeQualified(self._path(name)), how)

    def must_be_empty(self) -> None:
        """Raises BadOption for a directory that has something in it."""
        if self.names():
            raise BadOption(
                f"{self.path} is there and not empty: give a directory that is not there yet"
            )

    def claim(self, name: str) -> bool:
        """Make an empty file, and the directory; whether nobody had made it before."""
        if self._local:
            path = self._file(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.open("x").close()
            except FileExistsError:
                return False
            return True
        return bool(self._fs.createNewFile(self._path(name)))

    def remove(self, name: str) -> None:
        """Delete a member and what is in it."""
        self._fs.delete(self._path(name), True)

    @contextlib.contextmanager
    def removed_on_failure(self, *names: str) -> Iterator[None]:
        """Members that the block makes go when it fails."""
        from py4j.protocol import Py4JError

        try:
            yield
        except BaseException:
            with contextlib.suppress(Py4JError, OSError):  # what the block raised is the reason
                for name in names:
                    self.remove(name)
            raise


def _draft(name: str) -> str:
    """Whoever writes the same note at the same time has a draft of their own."""
    return f"{name}.{uuid.uuid4().hex[:8]}.new"


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(_draft(path.name))
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    with contextlib.suppress(FileNotFoundError):  # of a note that Hadoop has written
        path.with_name(f".{path.name}.crc").unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
