"""Numbered attempts: every process that works on a run takes the next number; only the newest may publish. Light."""

from dataclasses import dataclass

from ppoctl.errors import StorageError, SupersededError, quoted
from ppoctl.store.layout import RunLayout


@dataclass(frozen=True)
class Attempt:
    """This process's turn on the run."""

    layout: RunLayout
    number: int

    def require_newest(self) -> None:
        """Raise SupersededError when another attempt has started since, StorageError when this one's folder is gone.

        On a network file system a listing may be some seconds old. What is published is safe even then: a rename
        onto a name that exists fails.
        """
        newest = self.layout.newest_attempt
        if newest < self.number:
            raise StorageError(
                f"`{self.layout.attempt(self.number)}` is gone: something moves or deletes the run's files",
                hint=f"put it back, then resume: ls {quoted(self.layout.logs)}",
            )
        if newest != self.number:
            raise SupersededError(
                f"attempt {self.number} of `{self.layout.root}` was superseded by attempt {newest}; "
                "this one stops without publishing",
                hint=f"look at the run: ppoctl status {quoted(self.layout.root)}",
            )


def claim(layout: RunLayout) -> Attempt:
    """Take the next number. Creating the folder is the claim: it fails for all but one of two racing processes."""
    try:
        layout.logs.mkdir(parents=True, exist_ok=True)
        while True:
            number = layout.newest_attempt + 1
            try:
                layout.attempt(number).mkdir()
            except FileExistsError:
                continue
            return Attempt(layout, number)
    except OSError as error:
        raise StorageError(
            f"cannot write to run directory `{layout.root}`: {error.strerror}",
            hint=f"check owner and free space: ls -ld {quoted(layout.root)}; df -h {quoted(layout.root)}",
        ) from error
