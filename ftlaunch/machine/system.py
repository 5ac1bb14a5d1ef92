"""The files in which a system tells about itself, under a root that tests replace. What cannot be read is empty."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 1 << 20  # of a file; /proc/cpuinfo of 512 CPUs is the longest


@dataclass(frozen=True)
class System:
    root: Path = Path("/")

    def path(self, name: str) -> Path:
        return self.root / name

    def text(self, name: str) -> str:
        """Without the white space around it."""
        return self.raw(name).decode(errors="replace").strip()

    def raw(self, name: str) -> bytes:
        try:
            with self.path(name).open("rb") as file:
                return file.read(MOST_BYTES)
        except (OSError, ValueError):
            return b""

    def number(self, name: str) -> int | None:
        text = self.text(name)
        return int(text) if text.removeprefix("-").isdecimal() else None

    def names(self, folder: str, pattern: str) -> list[str]:
        """Of what is there, relative to the root and sorted."""
        try:
            return sorted(str(path.relative_to(self.root)) for path in self.path(folder).glob(pattern))
        except OSError:
            return []

    @property
    def wsl(self) -> bool:
        """Whether Windows is below."""
        return "microsoft" in self.text("proc/sys/kernel/osrelease").lower()

    @property
    def virtual(self) -> bool:
        """Whether the processor says that it is a virtual machine's."""
        return "hypervisor" in self.text("proc/cpuinfo").partition("flags")[2].partition("\n")[0].split()
