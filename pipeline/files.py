"""Small files beside Parquet, wherever Spark's paths lead: a directory through Hadoop's FileSystem.

Spark reads and writes the data; a job's own notes (what was exported, how far a table goes) are a
file of text, replaced as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Store:
    """One directory, local or of any file system that the session knows."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self.path = path.rstrip("/") or "/"
        self._jvm: Any = spark._jvm
        self._gateway: Any = spark.sparkContext._gateway
        self._conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
        self._fs: Any = self._path("").getFileSystem(self._conf)

    def at(self, name: str) -> str:
        """The path of a member, as Spark takes it."""
        return f"{self.path}/{name}" if name else self.path

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self.at(name))

    def names(self) -> list[str]:
        """The members; none where there is no directory."""
        root = self._path("")
        if not self._fs.exists(root):
            return []
        return [one.getPath().getName() for one in self._fs.listStatus(root)]

    def read(self, name: str) -> str | None:
        """A file of text; None where there is none."""
        if not self._fs.exists(self._path(name)):
            return None
        stream = self._fs.open(self._path(name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def replace(self, name: str, text: str) -> None:
        """Put ``text`` where that file was, at once."""
        draft = self._path(f"{name}.new")
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

    def remove(self, name: str) -> None:
        """Delete a member and what is in it."""
        self._fs.delete(self._path(name), True)
