"""A name node and a data node of HDFS on loopback, from Hadoop's jars and Java 17.

Nothing that Debian or PyPI offers is made for this, but the source package of pyspark 2.4.8 (218 MB) has the jars of
Hadoop 2.7.3, servers included. `HADOOP_JARS` names their folder:

    pip download --no-deps --no-binary :all: pyspark==2.4.8
    tar xzf pyspark-2.4.8.tar.gz --strip-components=3 -C jars --wildcards '*/deps/jars/*.jar'

They lack Jersey 1, so the name node serves RPC and no WebHDFS.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

JARS = os.environ.get("HADOOP_JARS")
OPENED = ("java.lang", "java.util", "java.net", "java.nio")
"""Packages of Java 17 that Hadoop 2.7 reaches into."""
SECONDS = 120


class HdfsServer:
    """Runs both nodes below a folder. `url`: where clients connect to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _free_port()
        self.url = f"hdfs://127.0.0.1:{self.port}"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._configure()
        assert (
            subprocess.run(self._command("namenode.NameNode", "-format"), check=False, cwd=self.folder).returncode == 0
        )
        for node in ("namenode.NameNode", "datanode.DataNode"):
            log = (self.folder / f"{node}.log").open("wb")
            self._running.append(subprocess.Popen(self._command(node), stdout=log, stderr=log, cwd=self.folder))
        self._wait_for("datanode.DataNode", b"Got finalize command")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _configure(self) -> None:
        settings = {
            "fs.defaultFS": self.url,
            "hadoop.tmp.dir": str(self.folder / "tmp"),
            "dfs.replication": "1",
            "dfs.webhdfs.enabled": "false",
            "dfs.permissions.enabled": "false",
            **{f"dfs.{name}": "127.0.0.1:0" for name in ("namenode.http-address", "datanode.http.address")},
            **{f"dfs.{name}": "127.0.0.1:0" for name in ("datanode.address", "datanode.ipc.address")},
        }
        items = [f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items()]
        for name in ("core-site.xml", "hdfs-site.xml"):
            (self.folder / name).write_text(f"<configuration>{''.join(items)}</configuration>")
        for name in ("hdfs", "datanode", "static"):
            web = self.folder / "webapps" / name / "WEB-INF"
            web.mkdir(parents=True)
            (web / "web.xml").write_text("<web-app/>")
        log = "log4j.rootLogger=INFO,A\nlog4j.appender.A=org.apache.log4j.ConsoleAppender\n"
        (self.folder / "log4j.properties").write_text(log + "log4j.appender.A.layout=org.apache.log4j.SimpleLayout\n")

    def _command(self, node: str, *flags: str) -> list[str]:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
        kerberos = "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED"
        options = [*opened, kerberos, "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED", "-Xmx512m"]
        return ["java", *options, "-cp", f".:{JARS}/*", f"org.apache.hadoop.hdfs.server.{node}", *flags]

    def _wait_for(self, node: str, line: bytes) -> None:
        end = time.monotonic() + SECONDS
        log = self.folder / f"{node}.log"
        while line not in log.read_bytes():
            assert time.monotonic() < end and all(p.poll() is None for p in self._running), log.read_bytes()[-2000:]
            time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
