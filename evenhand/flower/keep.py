"""What a client keeps from round to round: its personal model, its last model, its corrected labels.

With `state-dir` in the node's configuration it lies on the node's own disk and outlives the SuperNode and the run;
without, in the run's context, which Flower keeps in the SuperNode's memory. Flower may deliver a message twice, and a
server that was restarted may ask for a round again: so the version before the last one is kept too, and a round always
starts from what was there before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from safetensors.torch import load_file, save
from torch import Tensor

from evenhand import storage
from evenhand.checks import EvenhandError
from evenhand.flower import wire

VERSIONS = 2
PREFIX = "evenhand"


class Keep:
    """Tensors by name and round."""

    def __init__(self, context: Context, experiment: str) -> None:
        self.context = context
        self.folder: Path | None = None
        where = context.node_config.get("state-dir")
        if where:
            if not re.fullmatch(r"[0-9a-f]{1,64}", experiment):
                raise EvenhandError(f"the server calls its experiment {experiment!r}, which is no hexadecimal number")
            self.folder = Path(str(where)).expanduser() / experiment
            self.folder.mkdir(parents=True, exist_ok=True)

    def read(self, name: str, before: int | None = None) -> dict[str, Tensor] | None:
        """The newest version, or the newest from before a round; None where there is none."""
        rounds = [round for round in self._rounds(name) if before is None or round < before]
        if not rounds:
            return None
        if self.folder is not None:
            return load_file(self.folder / f"{name}-{rounds[-1]}.safetensors")
        return wire.tensors_of(self.context.state.array_records[f"{PREFIX}.{name}.{rounds[-1]}"])

    def write(self, name: str, round: int, tensors: Mapping[str, Tensor]) -> None:
        """A round's version; of older ones one is kept, of later ones none."""
        if self.folder is not None:
            tight = {key: tensor.contiguous() for key, tensor in tensors.items()}
            storage.write_bytes(self.folder / f"{name}-{round}.safetensors", save(tight))
        else:
            self.context.state[f"{PREFIX}.{name}.{round}"] = wire.record_of(tensors)
        older = [known for known in self._rounds(name) if known < round]
        for known in (*older[: 1 - VERSIONS], *(known for known in self._rounds(name) if known > round)):
            self._drop(name, known)

    def _rounds(self, name: str) -> list[int]:
        if self.folder is not None:
            found = [re.fullmatch(rf"{name}-(\d+)\.safetensors", path.name) for path in self.folder.iterdir()]
        else:
            found = [re.fullmatch(rf"{PREFIX}\.{name}\.(\d+)", key) for key in self.context.state.array_records]
        return sorted(int(match[1]) for match in found if match)

    def _drop(self, name: str, round: int) -> None:
        if self.folder is not None:
            (self.folder / f"{name}-{round}.safetensors").unlink(missing_ok=True)
        else:
            del self.context.state[f"{PREFIX}.{name}.{round}"]
