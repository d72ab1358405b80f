"""The command line of pretraining; `python -m nqflib.language_model.pretrain --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nqflib.language_model import parallel
from nqflib.language_model.corpus import OwnText, unigram_entropy
from nqflib.language_model.cost import DEVICES, cost
from nqflib.language_model.optimizer import SCHEDULES
from nqflib.language_model.presets import PRESETS, preset
from nqflib.language_model.pretrain import Diverged, Run, Trained, pretrain, run_folder
from nqflib.language_model.storage import cache_folder


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    p = argparse.ArgumentParser(prog="python -m nqflib.language_model.pretrain", description="Train a language model.")
    p.add_argument("--preset", default="laptop", choices=list(PRESETS), help="the scale (default: laptop)")
    p.add_argument("--batch", type=int, nargs="+", help="windows a step (default: all batches of the preset)")
    p.add_argument("--schedule", default="cosine", choices=SCHEDULES, help="learning rate after the warm-up")
    p.add_argument("--base-rate", type=float, help="the peak learning rate is this times sqrt(min(batch, cap))")
    p.add_argument("--seed", type=int, default=0, help="of weights and of the order of windows")
    p.add_argument("--text", nargs="+", metavar="FILE", help="train on your own UTF-8 text files, one document each")
    p.add_argument("--until", type=float, default=1.0, help="share of the run after which to stop")
    p.add_argument("--device", default="auto", help="cpu, cuda or auto")
    p.add_argument("--folder", type=Path, help=f"where tokens and runs are kept (default: {cache_folder()})")
    p.add_argument("--dry-run", action="store_true", help="say what it will cost, and do nothing")
    p.add_argument("--gpu", default="h100", choices=list(DEVICES), help="the device that --dry-run counts hours for")
    p.add_argument("--gpus", type=int, default=1, help="how many of them")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the runs that are asked for; 1 if one diverged, 2 for what cannot be done, with the reason."""
    options = parser().parse_args(arguments)
    scale = preset(options.preset)
    if options.text:
        scale = replace(scale, source=OwnText(tuple(options.text)))
    try:
        runs = [
            Run.of(scale, batch, schedule=options.schedule, base_rate=options.base_rate, seed=options.seed)
            for batch in options.batch or scale.batches
        ]
        if options.dry_run:
            for run in runs:
                print(f"{scale.name}, batch {run.batch}, {run.schedule}, peak rate {run.peak_rate:.4g}")
                print(cost(run, options.gpu, devices=options.gpus).table(), end="\n\n")
            return 0
        with parallel.process_group(parallel.resolve_device(options.device)):
            for run in runs:
                trained = pretrain(run, folder=options.folder, device=options.device, until=options.until)
                if parallel.rank() == 0:
                    print(_summary(run, trained, options.device, options.folder))
    except Diverged as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _summary(run: Run, trained: Trained, device: str, folder: Path | None) -> str:
    history = trained.history
    entropy = unigram_entropy(trained.corpus.held_out[:, 1:], trained.corpus.vocabulary)
    replaced = sum(trained.corpus.replaced.values())
    lines = [
        f"batch {run.batch}, {run.schedule}: at step {history.step[-1]} of {run.steps}, {history.tokens[-1]:,} tokens,",
        f"  held-out loss {history.loss[-1]:.4f}, of the averaged weights {history.average_loss[-1]:.4f} nats a token"
        f" (unigram entropy {entropy:.4f})",
        f"  checkpoints in {run_folder(run, trained.corpus, parallel.resolve_device(device), folder)}",
    ]
    if replaced:
        worst = ", ".join(f"{c!r} {n}" for c, n in sorted(trained.corpus.replaced.items(), key=lambda x: -x[1])[:8])
        lines.insert(1, f"  {replaced:,} characters of the text were replaced by plain ones: {worst}")
    return "\n".join(lines)
