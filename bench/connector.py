"""Spark's Kafka connector in an environment of its own: PySpark by pip, its jars by Maven, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import brokers  # noqa: F401  (it finds the tests' tools)

VERSION = "4.0.0"
"""The newest of which registries have every jar."""
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>kept</groupId><artifactId>connector</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.spark</groupId><artifactId>spark-sql-kafka-0-10_2.13</artifactId>
    <version>{VERSION}</version>
  </dependency></dependencies>
</project>
"""
JARS = (
    "spark-sql-kafka-0-10_2.13",
    "spark-token-provider-kafka-0-10_2.13",
    "kafka-clients",
    "commons-pool2",
)


def install() -> tuple[str, str]:
    """The Python and the jars (separated by commas), made unless they are there."""
    from tests.tools import kafka_dist

    target = kafka_dist.home().parent / f"spark-connector-{VERSION}"
    python = target / "venv" / "bin" / "python"
    if not (target / "done").exists():
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", target / "venv"], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, f"pyspark=={VERSION}"], check=True)
        (target / "pom.xml").write_text(POM)
        copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=libs"]
        subprocess.run(
            [*copy, "-DincludeArtifactIds=" + ",".join(JARS)],
            cwd=target,
            check=True,
            stdout=sys.stderr,
        )
        (target / "done").touch()
    return str(python), ",".join(str(jar) for jar in sorted(Path(target / "libs").glob("*.jar")))
