"""One run, in a process of its own: a method, a share of replay, a rate, a seed. Prints its record as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from methods import BY_NAME, Method
from torch.nn import functional as F

from surgeon.checkpoint.folder import CheckpointFolder
from surgeon.data.documents import Documents
from surgeon.data.encoding import Encoder
from surgeon.data.packing import IGNORED_LABEL, Batches, Mixture, Packer, SourceStream, batch_of, held_out
from surgeon.families.dissect import dissect
from surgeon.manifest.manifest import MANIFEST_FILE, parse
from surgeon.manifest.trainable import trainable_set
from surgeon.models.load import load_model
from surgeon.train.config import Settings
from surgeon.train.optimizer import make_optimizer, make_schedule
from surgeon.train.trainer import unfreeze

FRENCH = ("fr_man", "fr_gnome", "fr_handbook", "fr_office")
REPLAYED = "en_office"
ORIGINAL = "en_man"
# Where the curve is taken, as shares of the run.
MARKS = (0.125, 0.25, 0.5, 1.0)
# Held-out sequences: of the original text, and of each French source.
ORIGINAL_SEQUENCES, FRENCH_SEQUENCES = 128, 32
FLOOR, WARMUP = 0.1, 0.05


def run(spec: dict[str, Any], outs: Path, base: Path, corpora: Path) -> dict[str, Any]:
    """Train by `spec` (method, p, rate, seed, steps, batch, length, device) and measure along the way."""
    begun = time.perf_counter()
    method = BY_NAME[spec["method"]]
    torch.manual_seed(spec["seed"])
    model, trainable = load(method, outs, base, spec)
    data = Data(base, corpora, spec)
    settings = Settings(
        steps=spec["steps"],
        seed=spec["seed"],
        batch=spec["batch"],
        micro_batch=spec["batch"],
        accumulation=1,
        length=spec["length"],
        lr=spec["rate"],
        min_lr=FLOOR * spec["rate"],
        schedule="cosine",
        warmup_steps=max(1, round(WARMUP * spec["steps"])),
        betas=(0.9, 0.95),
        weight_decay=0.0,
        clip=1.0,
    )
    optimizer = make_optimizer(model, settings, decayed=set())
    schedule = make_schedule(optimizer, settings)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = iter(
        Batches(data.mixture, micro_batch=spec["batch"], process=0, processes=1, domains=hasattr(model, "surgery"))
    )
    curve = [{"step": 0, **data.measure(model)}]
    marks = {round(mark * spec["steps"]) for mark in MARKS if mark == 1.0 or spec["steps"] >= 1000}
    for step in range(1, spec["steps"] + 1):
        model.train()
        loss = model(**{name: tensor.to(model.device) for name, tensor in next(batches).items()}, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        schedule.step()
        if step in marks:
            curve.append({"step": step, **data.measure(model)})
    return {
        **spec,
        "trainable": trainable,
        "curve": [{key: value for key, value in point.items() if key != "sequences"} for point in curve],
        "sequences": curve[-1]["sequences"],
        "machine": machine(spec["device"]),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def load(method: Method, outs: Path, base: Path, spec: dict[str, Any]) -> tuple[Any, int]:
    """The model with exactly what the method trains unfrozen, and how many numbers that is."""
    folder = grown(outs, method.name, spec["seed"]) if method.how == "plan" else base
    # At these lengths the plain attention is the faster one in bfloat16 on a CPU.
    attention = "eager" if spec["device"] == "cpu" else "sdpa"
    model = load_model(folder, dtype="auto", device=spec["device"], attention=attention)
    model.requires_grad_(False)
    if method.how == "plan":
        out = CheckpointFolder.open(folder)
        manifest = parse(
            json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8")), file=str(folder / MANIFEST_FILE)
        )
        unfreeze(model, trainable_set(out, manifest, "last"), base_names=out.tensors)
    elif method.how == "full":
        model.requires_grad_(True)
    elif method.how == "partial":
        for layer in model.model.layers[3::4]:
            layer.requires_grad_(True)
    else:
        model = with_lora(model, grown(outs, "nr", spec["seed"]))
    for parameter in model.parameters():
        # Loaded weights may be mapped from the file.
        if parameter.requires_grad:
            parameter.data = parameter.data.clone()
    return model, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def machine(device: str) -> str:
    """The machine in words."""
    if device == "cpu":
        return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} a run"
    return torch.cuda.get_device_name()


def grown(outs: Path, method: str, seed: int) -> Path:
    """Where the checkpoint grown for a method lies; what a plan draws is drawn anew for every seed."""
    return outs / f"{method}-{seed}"


def with_lora(model: Any, adapted: Path) -> Any:
    """PEFT's LoRA on the FFN, of the rank at which it has as many numbers as Neutral Residues."""
    import peft

    manifest = json.loads((adapted / MANIFEST_FILE).read_text(encoding="utf-8"))
    tensors = CheckpointFolder.open(adapted).tensors
    numbers = sum(tensors[name].numel for name in manifest["new_tensors"])
    targets = ["gate_proj", "up_proj", "down_proj"]
    per_rank = sum(
        module.in_features + module.out_features
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets
    )
    rank = round(numbers / per_rank)
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=False)


class Data:
    """What is trained on, and what is held out."""

    def __init__(self, base: Path, corpora: Path, spec: dict[str, Any]) -> None:
        folder = CheckpointFolder.open(base)
        encoder = Encoder(base, vocabulary=dissect(folder.config, folder.tensors).sizes.vocabulary)
        self.batch, length = 8 * spec["batch"], spec["length"]
        streams, shares = [], []
        files = {name: corpora / f"{name}.train.jsonl" for name in (*FRENCH, REPLAYED)}
        french = sum(files[name].stat().st_size for name in FRENCH)
        for name, file in files.items():
            share = spec["p"] if name == REPLAYED else (1 - spec["p"]) * file.stat().st_size / french
            if share:
                documents = Documents(file, key="text", chat=False)
                packer = Packer(length, "isolated", 0 if name == REPLAYED else 1)
                numbers = torch.arange(len(documents)).numpy()
                streams.append(SourceStream(name, documents, numbers, encoder, packer, seed=spec["seed"]))
                shares.append(share)
        self.mixture = Mixture(streams, shares, seed=spec["seed"])
        self.held = {}
        for name in (ORIGINAL, *FRENCH):
            documents = Documents(corpora / f"{name}.val.jsonl", key="text", chat=False)
            most = ORIGINAL_SEQUENCES if name == ORIGINAL else FRENCH_SEQUENCES
            packer = Packer(length, "isolated", 0)
            every = held_out(documents, range(len(documents)), encoder, packer, most=sys.maxsize)
            # Not the first ones: a long document would be most of them.
            order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).tolist()
            self.held[name] = [every[number] for number in order[:most]]

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, Any]:
        """Mean loss a token of the original text (`en`), of each French source and their mean (`fr`), in nats.

        `sequences` are the sums over each held-out sequence, and how many tokens they are of.
        """
        model.eval()
        found: dict[str, Any] = {"sequences": {}}
        for name, held in self.held.items():
            sums: list[float] = []
            counts: list[int] = []
            for begin in range(0, len(held), self.batch):
                batch = batch_of(held[begin : begin + self.batch], domains=False)
                labels = batch.pop("labels")[:, 1:].to(model.device)
                inputs = {key: tensor.to(model.device) for key, tensor in batch.items()}
                logits = model(**inputs, use_cache=False).logits[:, :-1].float()
                losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=IGNORED_LABEL)
                sums += losses.double().sum(1).tolist()
                counts += (labels != IGNORED_LABEL).sum(1).tolist()
            found[name] = sum(sums) / sum(counts)
            found["sequences"][name] = [[round(total, 3) for total in sums], counts]
        found["en"] = found[ORIGINAL]
        found["fr"] = sum(found[name] for name in FRENCH) / len(FRENCH)
        return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(run(json.loads(sys.argv[1]), *map(Path, sys.argv[3:6]))))
