"""The folder of a running conversion: what is finished, what can be resumed, what is left behind.

Everything lies in `<out>.partial` until the student has passed its gate; then the student moves to `<out>` and the
folder goes. Killed at any moment, a run continues from what is in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linearize.convert.errors import ConversionError
from linearize.convert.export import check_output
from linearize.distill import processes
from linearize.recipes.schema import Recipe

_FREE = ("report_to",)
"""What a resumed run may do otherwise."""


class Workspace:
    """State of one run. Measurements are kept as they are made, so that a resumed run does not repeat them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.student = self.folder / "student"
        self.results: dict[str, Any] = {}

    def open(self, recipe: Recipe, source: Path, resume: bool, force: bool) -> bool:
        """Prepare the folder; returns whether an earlier run is continued. Of several processes, the first does it.

        Raises:
            ConversionError: the output is in use, or the run to be resumed was another recipe.
        """
        resumed, self.results = processes.on_main(lambda: (self._open(recipe, source, resume, force), self.results))
        return resumed

    def _open(self, recipe: Recipe, source: Path, resume: bool, force: bool) -> bool:
        if not force:
            check_output(source, self.out)
        elif self.out.resolve() == source.resolve():
            raise ConversionError(f"output {self.out} is the teacher's own folder; choose another with --out")
        written = self.folder / "recipe.json"
        if written.is_file() and resume:
            before, now = json.loads(written.read_text()), recipe.model_dump(mode="json")
            if changed := [key for key in now if key not in _FREE and before.get(key) != now[key]]:
                key = changed[0]
                raise ConversionError(
                    f"{self.folder} was started with {key} = {before.get(key)!r}, not {now[key]!r}; "
                    "resume with the same settings or start over with --force"
                )
            self.results = self._read("results.json")
            return True
        if self.folder.exists():
            if written.is_file() and not force:
                raise ConversionError(
                    f"{self.folder} holds an unfinished run; continue it with --resume or start over with --force"
                )
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        self.write("recipe.json", recipe.model_dump(mode="json"))
        return False

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """The JSON-able result of `compute()`, from disk if a killed run made it already."""
        if key not in self.results:
            self.results[key] = processes.on_main(compute)
            self.write("results.json", self.results)
        return self.results[key]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the seconds spent inside to the stage's account."""
        began = time.perf_counter()
        yield
        seconds = self.results.setdefault("seconds", {})
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - began
        self.write("results.json", self.results)

    def state(self, stage: str) -> Path:
        """Where a stage keeps its state."""
        return self.folder / f"{stage}.safetensors"

    @property
    def trained(self) -> bool:
        """Whether any stage has saved a state: then the folder is worth keeping after an error."""
        return any(self.folder.glob("*.safetensors"))

    def discard(self) -> None:
        if processes.is_main():
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> None:
        """Move the student to its place."""
        if not processes.is_main():
            return
        if self.out.exists():
            shutil.rmtree(self.out)
        os.replace(self.student, self.out)
        self.discard()

    def _read(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        return json.loads(file.read_text()) if file.is_file() else {}

    def write(self, name: str, data: Any) -> None:
        """Keep JSON-able data in the folder, whole or not at all."""
        if not processes.is_main():
            return
        temporary = self.folder / (name + ".tmp")
        temporary.write_text(json.dumps(data, indent=1))
        os.replace(temporary, self.folder / name)
