"""All architectures of the zoo that must be exact."""

from . import configured, convolutional, sequences
from .entry import Entry

ENTRIES: list[Entry] = [*convolutional.ENTRIES, *sequences.ENTRIES, *configured.ENTRIES]
BY_NAME: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
assert len(BY_NAME) == len(ENTRIES), "two architectures of the zoo share a name"
