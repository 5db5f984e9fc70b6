"""Work beside the rest on a GPU."""

from __future__ import annotations

from typing import Any

import torch


class Side:
    """Work beside the rest on a GPU: on a stream that begins here and is joined later. Elsewhere nothing special."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self._entered: Any = None

    def __enter__(self) -> Side:
        if self.stream is not None:
            self._entered = torch.cuda.stream(self.stream)
            self._entered.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self._entered.__exit__(*error)

    def join(self) -> None:
        """What follows waits for the work."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
