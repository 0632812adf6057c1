"""What the API's functions give back: typed results, each with its plain data for `--json`. No logic of surgery.

A file here holds the results of the file of its name in `surgeon.api`.
"""

from __future__ import annotations

from surgeon.results.growing import Applied, Merged, Preview
from surgeon.results.learning import Continued, Evaluation, ModelScores, SourceScores, Trained
from surgeon.results.parts import AppliedDelta, Exported, MadeDelta, Reverted
from surgeon.results.proving import Difference, Verification
from surgeon.results.sharing import Pushed, Upload
from surgeon.results.telling import GateChoices, Inspection, Reported, RouterChoices, RoutingReport, TextChoices

__all__ = [
    "Applied",
    "AppliedDelta",
    "Continued",
    "Difference",
    "Evaluation",
    "Exported",
    "GateChoices",
    "Inspection",
    "MadeDelta",
    "Merged",
    "ModelScores",
    "Preview",
    "Pushed",
    "Reported",
    "Reverted",
    "RouterChoices",
    "RoutingReport",
    "SourceScores",
    "TextChoices",
    "Trained",
    "Upload",
    "Verification",
]
