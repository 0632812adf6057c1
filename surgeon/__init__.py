"""surgeon: grow a pretrained language model by a plan, and prove that nothing was lost.

    import surgeon
    surgeon.apply("plan.yaml", "base-model", "out")

mirrors the command line, one function a command; the function and its result are in the command's room. Progress is
shown where a listener is given (`with surgeon.ProgressListener() as listener`), errors for the user are `SurgeonError`.
"""

import os
import sys

# `python -m surgeon…` has the working directory first on its path, and this file is the first of surgeon's that runs:
# a `typing.py` that lies there is not what is imported below. So nothing is imported above, not even `__future__`.
if sys.argv[:1] == ["-m"] and sys.path[:1] in ([""], [os.getcwd()]):  # noqa: PTH109
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

from surgeon._version import __version__ as __version__

if TYPE_CHECKING:
    from surgeon.checkpoint.staging import check_destination as check_destination
    from surgeon.common.listener import ProgressListener as ProgressListener
    from surgeon.data.answers import Answer as Answer
    from surgeon.data.answers import EncodedPrompts as EncodedPrompts
    from surgeon.data.answers import answer as answer
    from surgeon.data.answers import encode_prompts as encode_prompts
    from surgeon.data.documents import text_files as text_files
    from surgeon.data.held_out import HeldOut as HeldOut
    from surgeon.data.held_out import held_out_text as held_out_text
    from surgeon.data.recall import recall as recall
    from surgeon.data.scored import cut as cut
    from surgeon.data.scored import divergence as divergence
    from surgeon.data.scored import judge as judge
    from surgeon.data.scored import pack as pack
    from surgeon.data.scored import score as score
    from surgeon.data.scored import written as written
    from surgeon.data.scores import Judged as Judged
    from surgeon.data.scores import Ratio as Ratio
    from surgeon.data.scores import Scores as Scores
    from surgeon.data.scores import Windows as Windows
    from surgeon.data.sources import check_source as check_source
    from surgeon.data.sources import is_chat as is_chat
    from surgeon.data.sources import open_source as open_source
    from surgeon.data.specs import GenerateSpec as GenerateSpec
    from surgeon.data.specs import SourceSpec as SourceSpec
    from surgeon.data.specs import TextSpec as TextSpec
    from surgeon.data.specs import UnlabelledSpec as UnlabelledSpec
    from surgeon.errors import BadInput as BadInput
    from surgeon.errors import Diverged as Diverged
    from surgeon.errors import PromiseBroken as PromiseBroken
    from surgeon.errors import SurgeonError as SurgeonError
    from surgeon.lab.courses.continual import continual as continual
    from surgeon.lab.evaluation.blend import blend as blend
    from surgeon.lab.evaluation.evaluate import evaluate as evaluate
    from surgeon.lab.evaluation.open_texts import open_texts as open_texts
    from surgeon.lab.evaluation.results import Evaluation as Evaluation
    from surgeon.lab.evaluation.results import LabelScores as LabelScores
    from surgeon.lab.evaluation.results import SourceScores as SourceScores
    from surgeon.lab.reports.families import families as families
    from surgeon.lab.reports.inspect import inspect as inspect
    from surgeon.lab.reports.report import report as report
    from surgeon.lab.reports.routing import routing_report as routing_report
    from surgeon.lab.reports.transport import transport_report as transport_report
    from surgeon.lab.studies.compare import compare as compare
    from surgeon.manifest.checkpoint import Checkpoint as Checkpoint
    from surgeon.manifest.checkpoint import check_model as check_model
    from surgeon.manifest.checkpoint import open_checkpoint as open_checkpoint
    from surgeon.manifest.manifest import Manifest as Manifest
    from surgeon.manifest.run_files import add_record as add_record
    from surgeon.manifest.trainable import LayersSpec as LayersSpec
    from surgeon.operations import OPERATIONS as OPERATIONS
    from surgeon.operations.pmoe_experts import RouterLoss as RouterLoss
    from surgeon.plan.plan import LoadedPlan as LoadedPlan
    from surgeon.plan.plan import json_schema as json_schema
    from surgeon.plan.plan import load_plan as load_plan
    from surgeon.plan.plan import parse_plan as parse_plan
    from surgeon.plan.shipped import FoundPlan as FoundPlan
    from surgeon.plan.shipped import find_plan as find_plan
    from surgeon.plan.shipped import find_sweep as find_sweep
    from surgeon.plan.shipped import load_named as load_named
    from surgeon.plan.shipped import shipped_plans as shipped_plans
    from surgeon.plan.shipped import shipped_studies as shipped_studies
    from surgeon.plan.shipped import shipped_tasks as shipped_tasks
    from surgeon.plan.sweep import overrides_of as overrides_of
    from surgeon.rework.apply_delta import apply_delta as apply_delta
    from surgeon.rework.make_delta import make_delta as make_delta
    from surgeon.rework.merge import merge as merge
    from surgeon.rework.refresh import refresh as refresh
    from surgeon.rework.revert import revert as revert
    from surgeon.share.export_slot import export_slot as export_slot
    from surgeon.share.push import push as push
    from surgeon.training.config.loading import LoadedConfig as LoadedConfig
    from surgeon.training.config.loading import load_config as load_config
    from surgeon.training.config.schema import LoraSpec as LoraSpec
    from surgeon.training.config.schema import OptimizerSpec as OptimizerSpec
    from surgeon.training.config.schema import PreserveSpec as PreserveSpec
    from surgeon.training.config.schema import RunSettings as RunSettings
    from surgeon.training.config.schema import TeacherSpec as TeacherSpec
    from surgeon.training.config.schema import TrainConfig as TrainConfig
    from surgeon.training.config.settings import settle as settle
    from surgeon.training.publishing import Trained as Trained
    from surgeon.training.remedies.blend import Blend as Blend
    from surgeon.training.remedies.blend import write_blend as write_blend
    from surgeon.training.train import check_training as check_training
    from surgeon.training.train import discard_run as discard_run
    from surgeon.training.train import rehearse as rehearse
    from surgeon.training.train import train as train
    from surgeon.verification.diff import diff as diff
    from surgeon.verification.verification import Verification as Verification
    from surgeon.verification.verification import verification_view as verification_view
    from surgeon.verification.verify import verify as verify
    from surgeon.writing.apply import Applied as Applied
    from surgeon.writing.apply import apply as apply
    from surgeon.writing.preview import preview as preview
    from surgeon.writing.preview_view import preview_view as preview_view

# What `import surgeon` offers, and the module that defines it; loaded at first use, so that `surgeon --help` does not
# wait for pydantic.
_HOMES = {
    "Answer": "data.answers",
    "Applied": "writing.apply",
    "BadInput": "errors",
    "Checkpoint": "manifest.checkpoint",
    "Diverged": "errors",
    "EncodedPrompts": "data.answers",
    "Evaluation": "lab.evaluation.results",
    "FoundPlan": "plan.shipped",
    "GenerateSpec": "data.specs",
    "HeldOut": "data.held_out",
    "Judged": "data.scores",
    "LabelScores": "lab.evaluation.results",
    "LayersSpec": "manifest.trainable",
    "LoadedConfig": "training.config.loading",
    "LoadedPlan": "plan.plan",
    "LoraSpec": "training.config.schema",
    "Manifest": "manifest.manifest",
    "OPERATIONS": "operations",
    "OptimizerSpec": "training.config.schema",
    "PreserveSpec": "training.config.schema",
    "ProgressListener": "common.listener",
    "PromiseBroken": "errors",
    "Ratio": "data.scores",
    "RouterLoss": "operations.pmoe_experts",
    "RunSettings": "training.config.schema",
    "Scores": "data.scores",
    "SourceScores": "lab.evaluation.results",
    "SourceSpec": "data.specs",
    "SurgeonError": "errors",
    "TeacherSpec": "training.config.schema",
    "TextSpec": "data.specs",
    "TrainConfig": "training.config.schema",
    "Trained": "training.publishing",
    "UnlabelledSpec": "data.specs",
    "Verification": "verification.verification",
    "Windows": "data.scores",
    "add_record": "manifest.run_files",
    "answer": "data.answers",
    "apply": "writing.apply",
    "apply_delta": "rework.apply_delta",
    "check_destination": "checkpoint.staging",
    "check_model": "manifest.checkpoint",
    "check_source": "data.sources",
    "check_training": "training.train",
    "compare": "lab.studies.compare",
    "continual": "lab.courses.continual",
    "cut": "data.scored",
    "diff": "verification.diff",
    "discard_run": "training.train",
    "divergence": "data.scored",
    "encode_prompts": "data.answers",
    "evaluate": "lab.evaluation.evaluate",
    "export_slot": "share.export_slot",
    "families": "lab.reports.families",
    "find_plan": "plan.shipped",
    "find_sweep": "plan.shipped",
    "held_out_text": "data.held_out",
    "inspect": "lab.reports.inspect",
    "is_chat": "data.sources",
    "json_schema": "plan.plan",
    "judge": "data.scored",
    "load_config": "training.config.loading",
    "load_named": "plan.shipped",
    "load_plan": "plan.plan",
    "make_delta": "rework.make_delta",
    "merge": "rework.merge",
    "blend": "lab.evaluation.blend",
    "Blend": "training.remedies.blend",
    "write_blend": "training.remedies.blend",
    "open_checkpoint": "manifest.checkpoint",
    "open_source": "data.sources",
    "open_texts": "lab.evaluation.open_texts",
    "overrides_of": "plan.sweep",
    "pack": "data.scored",
    "parse_plan": "plan.plan",
    "preview": "writing.preview",
    "preview_view": "writing.preview_view",
    "push": "share.push",
    "recall": "data.recall",
    "rehearse": "training.train",
    "report": "lab.reports.report",
    "refresh": "rework.refresh",
    "revert": "rework.revert",
    "routing_report": "lab.reports.routing",
    "score": "data.scored",
    "settle": "training.config.settings",
    "shipped_plans": "plan.shipped",
    "shipped_studies": "plan.shipped",
    "shipped_tasks": "plan.shipped",
    "text_files": "data.documents",
    "train": "training.train",
    "transport_report": "lab.reports.transport",
    "verification_view": "verification.verification",
    "verify": "verification.verify",
    "written": "data.scored",
}

__all__ = sorted([*_HOMES, "__version__"])


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
