"""When a run evaluates, logs and shows what it does."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback

from surgeon.common.listener import Listener
from surgeon.training.config.settings import Settings


class Cadence(TrainerCallback):  # type: ignore[misc]
    """Evaluates, and logs where it saves, so that a resumed run's log is an uninterrupted one's; shows both.

    Speed is in tokens a second, with `examples` in examples. `terms` are the names in the log of what is added to the
    loss, with what a line calls each.

    `done` steps were made before; `listener` shows progress (None: another process does). The speed and the time that
    is left are taken from the steps since this call began, without those in which something was measured or saved.
    """

    def __init__(
        self,
        settings: Settings,
        evaluate_every: int,
        say: Callable[[str], None],
        listener: Listener | None,
        done: int,
        *,
        examples: bool,
        terms: Sequence[tuple[str, str]],
    ) -> None:
        self.settings = settings
        self.evaluate_every = evaluate_every
        self.say = say
        self.listener = listener
        self.done = done
        self.examples = examples
        self.terms = terms
        self._begun = 0.0
        self._steps = 0
        self._seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step's clock begins."""
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Set what is due after this step."""
        self._steps += 1
        self._seconds += time.perf_counter() - self._begun
        last = state.global_step >= state.max_steps
        control.should_evaluate = last or state.global_step % self.evaluate_every == 0
        control.should_log = control.should_log or control.should_save or control.should_evaluate or last
        if self.listener is not None:
            self.listener.advance(state.global_step - self.done)
        self.done = state.global_step
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Say what was logged."""
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            terms = [f"{logs[key]:.4f} {what}" for key, what in self.terms if key in logs]
            added = f" ({', '.join(terms)})" if terms else ""
            said = f"step {state.global_step}: loss {logs['loss']:.4f}{added}, rate {logs['learning_rate']:.3g}"
            self.say(said + self._pace(state, logs))
        held = {key[5:-5]: value for key, value in logs.items() if key.startswith("eval_") and key.endswith("_loss")}
        if held:
            right = {name: logs.get(f"eval_{name}_accuracy") for name in held}
            shown = ", ".join(
                f"{name} {loss:.4f}" + ("" if right[name] is None else f" ({right[name]:.1%} right)")
                for name, loss in held.items()
            )
            self.say(f"step {state.global_step}: held-out loss {shown}")
            if self.listener is not None:
                self.listener.rename(f"training ({shown})")

    def _pace(self, state: Any, logs: dict[str, Any]) -> str:
        """The gradient's norm, tokens a second and the time that is left, where they are known."""
        found = f", gradient norm {float(logs['grad_norm']):.3g}" if logs.get("grad_norm") is not None else ""
        if not self._steps:
            return found
        step = self._seconds / self._steps
        made = self.settings.batch * (1 if self.examples else self.settings.length)
        unit = "examples" if self.examples else "tokens"
        left = datetime.timedelta(seconds=round(step * (state.max_steps - state.global_step)))
        return f"{found}, {made / step:,.0f} {unit}/s, {left} left"
