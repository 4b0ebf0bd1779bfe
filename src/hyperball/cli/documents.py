"""Documents of a user that a command fills in: text in UTF-8, whose line endings stay what they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hyperball.cli.parsing import UsageError


@dataclass(frozen=True)
class Document:
    """A text with lines that end in "\\n", and how they end in its file."""

    path: Path
    text: str
    ending: str

    def replace(self, text: str) -> None:
        """Write another text in its place."""
        from hyperball.files import write_bytes

        write_bytes(self.path.resolve(), text.replace("\n", self.ending).encode())


def read_document(path: Path) -> Document:
    """The document in a file that `--into` names; what is no text is refused."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--into {path} must be a text in UTF-8: byte {error.start} is not") from None
    if 0 < text.count("\n") == text.count("\r\n"):
        return Document(path, text.replace("\r\n", "\n"), "\r\n")
    return Document(path, text, "\n")
