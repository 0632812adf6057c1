"""The schedule by which a run evaluates, logs and shows its progress."""

from __future__ import annotations

import datetime
import time
from typing import Any

from transformers import TrainerCallback

from surgeon.common.formatting import windows
from surgeon.training.run import Run


class Cadence(TrainerCallback):  # type: ignore[misc]
    """A callback that makes the trainer evaluate, and log where it saves, and shows what was logged.

    Logging at each checkpoint makes a resumed run's log equal to an uninterrupted one's. `done` steps of the run were
    made by earlier calls. The speed and the remaining time are estimated from the steps since this call began, without
    the time of evaluations and checkpoints.
    """

    def __init__(self, run: Run, done: int) -> None:
        """Begin to count the steps and seconds of this call."""
        self.run = run
        self.done = done
        # None where another process shows progress.
        self.listener = run.listener if run.ranks.leads else None
        self._begun = 0.0
        self._steps = 0
        self._seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the step's clock."""
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Stop the step's clock; request the evaluation and the log that are due after this step."""
        self._steps += 1
        self._seconds += time.perf_counter() - self._begun
        last = state.global_step >= state.max_steps
        control.should_evaluate = last or state.global_step % self.run.loaded.config.evaluate_every == 0
        control.should_log = control.should_log or control.should_save or control.should_evaluate or last
        if self.listener is not None:
            self.listener.advance(state.global_step - self.done)
        self.done = state.global_step
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Show what was logged: the loss, or held-out losses."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            logged = [remedy.logged for remedy in self.run.remedies if remedy.logged is not None]
            terms = [f"{logs[key]:.4f} {what}" for key, what in logged if key in logs]
            added = f" ({', '.join(terms)})" if terms else ""
            said = f"step {state.global_step}: loss {logs['loss']:.4f}{added}, rate {logs['learning_rate']:.3g}"
            self.run.say(said + self._pace(state, logs))
        held = {key[5:-5]: value for key, value in logs.items() if key.startswith("eval_") and key.endswith("_loss")}
        if held:
            right = {name: logs.get(f"eval_{name}_accuracy") for name in held}
            shown = ", ".join(
                f"{name} {loss:.4f}" + ("" if right[name] is None else f" ({right[name]:.1%} right)")
                for name, loss in held.items()
            )
            self.run.say(f"step {state.global_step}: held-out loss in {windows(self.run.settings.length)}: {shown}")
            if self.listener is not None:
                self.listener.rename(f"training ({shown})")

    def _pace(self, state: Any, logs: dict[str, Any]) -> str:
        """Return in words the gradient's norm, tokens or examples per second, and the remaining time, where known."""
        found = f", gradient norm {float(logs['grad_norm']):.3g}" if logs.get("grad_norm") is not None else ""
        if not self._steps:
            return found
        step = self._seconds / self._steps
        objective = self.run.objective
        speed = f"{objective.step_units(self.run.settings) / step:,.0f} {objective.unit}/s"
        left = datetime.timedelta(seconds=round(step * (state.max_steps - state.global_step)))
        return f"{found}, {speed}, {left} left"
