"""One rank of the trainer: a batch in, new weights and a checkpoint out.

In: a `TrainerSpec`, the other ranks, batches in order. Out: a `StepReport` for each, after checkpoint and weights are
on disk. A guard raises before any weight has changed; nothing is written then. Knows no socket, ledger or engine.

Order within step k: passes, guards, optimizer, checkpoint, weights, then older folders are removed.

Metrics of a step, all ranks together. Means are over the trained tokens that were computed, unless it says otherwise:

    loss, policy_loss, kl    as minimised: per trained token of an update, mean over the step's updates; kl is the k3
                             estimate to the base weights, absent with kl_coef=0
    entropy                  nats, at the sampling temperature
    grad_norm, lr            norm before clipping (mean over the updates of the step); learning rate
    ratio_mean, clip_fraction                 policy ratio to the start of the step; tokens held by a clip bound
    tis_capped_fraction, outlier_fraction     tokens whose engine weight was cut; tokens left out as outliers
    mismatch_k1, mismatch_k3, mismatch_max_abs, mismatch_tokens      trainer against engine on computed tokens sampled
                             by the weights at the start of the step; the first three are absent when there are none
    drift_k1, drift_k3, drift_max_abs, drift_tokens     the same on tokens of other weights
    staleness_mean, staleness_max             optimizer steps between sampling and training, over all trained tokens
    loss_tokens, computed_tokens              trained tokens; fewer are computed where some need no pass
    sample_tokens, packed_tokens, rows        tokens of the samples; their share left by packing; passes over it
    step_s, checkpoint_s, publish_s           seconds of rank 0: passes and optimizer; its files; the engine's files
    packed_tokens_per_s                       packed_tokens / step_s

Figures that are not finite are left out, and a batch without trained tokens has only those of time. A checkpoint keeps
those that are not of time.
"""

import dataclasses
import math
import time
from pathlib import Path

import torch

from claw_train.crash import crash_point
from claw_train.errors import GuardError, TrainerError, boundary
from claw_train.training.folders import (
    checkpoint_name,
    checkpoints_dir,
    clean,
    durable_folder,
    prune_checkpoints,
    prune_weights,
)
from claw_train.training.model import load_policy
from claw_train.training.packing import Tokens, flatten
from claw_train.training.passes import Sums, accumulate, compare, plan, score_old
from claw_train.training.ranks import Ranks
from claw_train.training.spec import Started, TrainerSpec
from claw_train.training.state import Progress, identity, load, save
from claw_train.training.weights import publish
from claw_train.types import Batch, StepReport, Version, WeightRef


class Trainer:
    """Owns model, optimizer and the folders of one policy."""

    def __init__(self, spec: TrainerSpec, ranks: Ranks) -> None:
        """Loads the model.

        Raises:
            ModelError: the model folder cannot be loaded.
            ConfigError: it does not go with the configuration.
        """
        config = spec.trainer
        self.spec = spec
        self._ranks = ranks
        self._run_dir = Path(spec.run_dir)
        self._policy = load_policy(spec, ranks.device)
        self._trainable = self._policy.trainable()
        self._optimizer = torch.optim.AdamW(
            self._trainable.values(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
        )
        self._model, self._prepared = ranks.wrap(self._policy.scorer, self._optimizer)
        self._identity = identity(spec)
        self._progress = Progress(version=Version(spec.policy, 0, 0))
        self._dirty = True
        """True while the weights in memory are not those of the last report."""
        self._last_checkpoint_at = time.monotonic()

    def start(self, checkpoint: Path | None, lineage: int) -> Started:
        """Takes up a checkpoint, or the base, under a new lineage.

        Later checkpoints are removed: they belong to the lineage that is left.

        Args:
            checkpoint: folder; None is the base, and only for a trainer that has not made a step.
            lineage: never used before in this run.

        Raises:
            ConfigError: the checkpoint is not whole or of another model or configuration.
            TrainerError: weights could not be written.
        """
        weights = None
        if checkpoint is not None:
            loaded = load(checkpoint, self._trainable, self._optimizer, self._identity)
            version = loaded.version._replace(policy=self.spec.policy, lineage=lineage)
            self._progress = dataclasses.replace(loaded, version=version)
        elif self._progress.version.step == 0:
            self._progress = Progress(version=Version(self.spec.policy, lineage, 0))
        else:
            raise TrainerError("a trainer that has made steps cannot go back to the base; start its ranks again")
        if self._ranks.rank == 0:
            clean(self._run_dir)
            prune_checkpoints(
                self._run_dir, keep=self.spec.trainer.keep_checkpoints, newest=self._progress.version.step
            )
            if checkpoint is not None:
                weights = self._publish(self._progress.version)
        self._dirty = False
        return Started(version=self._progress.version, weights=weights)

    def step(self, batch: Batch) -> StepReport | None:
        """One batch: optimizer updates, checkpoint where due, weights. Only rank 0 writes, and reports.

        A batch without trained tokens (every group of it was constant) changes no weight; the step counts all the same.

        Raises:
            GuardError: loss, gradient or mismatch beyond the limits. No file is written; weights are as before, unless
                an earlier minibatch of the step has changed them: then the trainer must be started again.
            TrainerError: the batch is not the next one or cannot be trained on, or the disk failed; after the
                latter the trainer must be started again from its checkpoint.
        """
        tokens = self._check(batch)
        begin = time.perf_counter()
        crash_point("trainer.step.before")
        metrics = self._metrics(batch, tokens, *self._train(batch, tokens)) if len(tokens) else {}
        crash_point("trainer.step.after")
        version = self._progress.version._replace(step=batch.step)
        self._progress = dataclasses.replace(self._progress, version=version, metrics=metrics)
        trained = time.perf_counter()
        checkpoint = self._checkpoint()
        saved = time.perf_counter()
        weights = self._publish(version) if self._ranks.rank == 0 else None
        self._dirty = False
        if weights is None:
            return None
        seconds = {
            "step_s": trained - begin,
            "checkpoint_s": saved - trained,
            "publish_s": time.perf_counter() - saved,
            "packed_tokens_per_s": metrics.get("packed_tokens", 0.0) / max(trained - begin, 1e-9),
        }
        metrics = {**metrics, **seconds}
        return StepReport(step=batch.step, weights=weights, metrics=metrics, checkpoint=checkpoint)

    def _check(self, batch: Batch) -> Tokens:
        if self._dirty:
            raise TrainerError("the trainer has no sound weights in memory: start it from its last checkpoint")
        current = self._progress.version
        if batch.step != current.step + 1:
            raise TrainerError(f"batch for step {batch.step} given to a trainer at step {current.step}")
        try:
            return flatten(batch.samples, current).to(self._ranks.device)
        except ValueError as error:
            raise TrainerError(f"the batch of step {batch.step} cannot be trained on: {error}") from None

    def _train(self, batch: Batch, tokens: Tokens) -> tuple[Sums, float]:
        """All updates of a step; returns the sums over all ranks and the mean gradient norm."""
        config, method = self.spec.trainer, self.spec.method
        with boundary(TrainerError, f"step {batch.step}"):
            updates = plan(
                batch.samples,
                minibatches=config.minibatches,
                ranks=self._ranks,
                max_tokens=config.tokens_per_micro_batch,
                zero_advantage=method.kl_coef > 0,
            )
            old = None
            sums = Sums()
            if len(updates) > 1:
                old = score_old(self._policy, updates, len(tokens))
                for update in updates:
                    for row in update.rows:
                        compare(tokens, old.policy[row.item_token], row, sums, active=update.scale > 0)
                sums = sums.reduce(self._ranks)
                self._guard_mismatch(sums)
            norms: list[float] = []
            for update in updates:
                self._prepared.zero_grad(set_to_none=True)
                found = accumulate(self._policy, self._model, self._ranks, update, tokens, method, old)
                found = found.reduce(self._ranks)
                if old is None:
                    self._guard_mismatch(found)
                norms.append(self._apply(batch.step, found))
                sums.merge(found)
            sums.add("updates", len(updates))
            return sums, sum(norms) / len(norms)

    def _apply(self, step: int, sums: Sums) -> float:
        """Clips and steps, unless a number is not finite; returns the gradient norm."""
        config = self.spec.trainer
        norm = self._ranks.clip(list(self._trainable.values()), config.max_grad_norm)
        loss = sums.total["loss"]
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._prepared.zero_grad(set_to_none=True)
            raise GuardError(
                f"step {step}: loss {loss}, gradient norm {norm}; both must be finite; nothing was written"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr(step)
        self._dirty = True
        self._prepared.step()
        return norm

    def _lr(self, step: int) -> float:
        """Constant after a linear warm-up."""
        config = self.spec.trainer
        return config.lr * min(1.0, step / config.warmup_steps) if config.warmup_steps else config.lr

    def _guard_mismatch(self, sums: Sums) -> None:
        """Halts when trainer and engine disagree about tokens of the same weights."""
        guards, count = self.spec.guards, sums.total["mismatch_tokens"]
        if not count:
            return
        worst, k3 = sums.peak["mismatch_max_abs"], sums.total["mismatch_k3"] / count
        if guards.mismatch_max_abs is not None and not worst <= guards.mismatch_max_abs:
            raise GuardError(
                f"guards.mismatch_max_abs: engine and trainer differ by {worst:.2e} nats on a token of the same "
                f"weights, the limit is {guards.mismatch_max_abs:.2e}; nothing was written"
            )
        over = 0 if guards.mismatch_k3 is None or k3 <= guards.mismatch_k3 else self._progress.over_limit + 1
        self._progress = dataclasses.replace(self._progress, over_limit=over)
        if over >= guards.mismatch_patience:
            raise GuardError(
                f"guards.mismatch_k3: engine and trainer differ by k3 {k3:.2e} on tokens of the same weights for "
                f"{over} batches in a row, the limit is {guards.mismatch_k3}; nothing was written"
            )

    def _checkpoint(self) -> str | None:
        """Writes a checkpoint if one is due; its folder, or None."""
        config, step = self.spec.trainer, self._progress.version.step
        waited = time.monotonic() - self._last_checkpoint_at
        due = (
            step % config.checkpoint_every_steps == 0
            or step == config.steps
            or (config.kind == "full" and waited >= 60 * config.checkpoint_every_minutes)
        )
        if not due or self._ranks.rank != 0:
            return None
        target = checkpoints_dir(self._run_dir) / checkpoint_name(step)
        with (
            boundary(TrainerError, f"checkpoint {target} cannot be written"),
            durable_folder(
                target,
                lambda: crash_point("trainer.checkpoint.before_rename"),
                lambda: crash_point("trainer.checkpoint.after_rename"),
            ) as folder,
        ):
            save(folder, self._trainable, self._optimizer, self._progress, self._identity)
        self._last_checkpoint_at = time.monotonic()
        prune_checkpoints(self._run_dir, keep=config.keep_checkpoints, newest=step)
        return str(target)

    def _publish(self, version: Version) -> WeightRef:
        ref = publish(
            self._policy,
            self.spec,
            version,
            lambda: crash_point("trainer.publish.before"),
            lambda: crash_point("trainer.publish.after"),
        )
        config = self.spec.trainer
        # those the engine serves and is about to load, and those of the steps that slots allow in the meantime
        keep = max(2, config.keep_checkpoints, config.max_staleness + 2)
        prune_weights(self._run_dir, policy=version.policy, keep=keep)
        return ref

    def _metrics(self, batch: Batch, tokens: Tokens, sums: Sums, norm: float) -> dict[str, float]:
        total, peak = sums.total, sums.peak
        computed, updates = max(total["computed"], 1.0), total["updates"]
        metrics = {name: total[name] / updates for name in ("loss", "policy_loss", "kl") if name in total}
        metrics |= {
            "entropy": total["entropy"] / computed,
            "grad_norm": norm,
            "lr": self._lr(batch.step),
            "ratio_mean": total["ratio_sum"] / computed,
            "clip_fraction": total["clipped"] / computed,
            "tis_capped_fraction": total["capped"] / computed,
            "outlier_fraction": total["outliers"] / computed,
            "staleness_mean": float(tokens.lag.mean()),
            "staleness_max": float(tokens.lag.max()),
            "loss_tokens": float(len(tokens)),
            "computed_tokens": total["computed"],
            "sample_tokens": float(sum(len(sample.token_ids) for sample in batch.samples)),
            "packed_tokens": total["packed"],
            "rows": total["rows"],
        }
        for name in ("mismatch", "drift"):
            count = total[f"{name}_tokens"]
            metrics[f"{name}_tokens"] = count
            if count:
                metrics[f"{name}_k1"] = total[f"{name}_k1"] / count
                metrics[f"{name}_k3"] = total[f"{name}_k3"] / count
                metrics[f"{name}_max_abs"] = peak[f"{name}_max_abs"]
        return {name: value for name, value in metrics.items() if math.isfinite(value)}
