"""The training loop: build, step, evaluate, save, resume.

GPUs and CPUs run the same code.  GPUs compute in bf16, and in MXFP8 where the recipe says so; CPUs compute in float32.  Weights are float32
unless `dtype` is bfloat16.

Gradients are sums over ranks (mxep.parallel). Every loss is divided by the number of valid tokens (targets that are not IGNORE) in the
step, over all ranks and microbatches. A run's numbers therefore do not depend on how its batch is split. The balance loss is an exception:
it is a mean over ranks and microbatches, unless its type is "global_aux_loss", and counts every token that is routed.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from mxep.comm import Transport, set_transport, transport_of
from mxep.comm.collective import gather_objects
from mxep.device import peak_bf16_flops, resolve_gemm_path
from mxep.json_files import typed
from mxep.models.flops import flops_per_token
from mxep.models.huggingface_files import load_published
from mxep.moe import MoE
from mxep.ops.attention.flash_attention_4 import check_flash_attention_4
from mxep.parallel import Recompute, build_meshes, cache_quantized_weights
from mxep.parallel.pipeline_parallel import stages_per_rank
from mxep.recipe import resolve_recipe
from mxep.step_graph import StepGraph
from mxep.train.build import build_options, build_stages, build_whole, merge_stages, state_precision
from mxep.train.checkpoint import Manifest, load_checkpoint, open_checkpoint
from mxep.train.checkpoint_writer import CheckpointWriter
from mxep.train.config import TrainConfig, save_config
from mxep.train.data.chat import ChatRows
from mxep.train.data.corpus import Corpus
from mxep.train.data.loader import Batch, TrainingSequences, held_out_batches, load_corpus
from mxep.train.data.tokenizer import ByteTokenizer, check_origin, load_tokenizer
from mxep.train.describe import (
    describe_chat,
    describe_mapped,
    describe_model,
    describe_peak,
    describe_recompute,
    describe_router,
    describe_schedule,
    describe_state,
    out_of_memory_note,
)
from mxep.train.distributed import TIMEOUT, Ranks, StopRequest, on_all_ranks
from mxep.train.garbage import GarbageCollection
from mxep.train.linear_choice import choose_linears, describe_linears
from mxep.train.memory import check_fits
from mxep.train.metrics import MetricsLog, StepRecord, memory_in_use, progress_notes
from mxep.train.numerics import NumericsWatch
from mxep.train.optimizer import (
    ExpertBiasHook,
    Schedule,
    build_optimizer,
    clipping_divisor,
    gradient_norm,
    optimizer_tensors,
)
from mxep.train.optimizer_in_backward import OptimizerInBackward
from mxep.train.rank_control import stop_signals
from mxep.train.recompute_budget import RecomputeChoice, agree_on_recompute
from mxep.train.resolved_config import keep_model, never_used, resolve, routed_as_asked
from mxep.train.resume import Changes, Difference, find_changes, keeps_order, stage_changes
from mxep.train.run_folder import CHECKPOINTS, METRICS_FILE, find_checkpoint, set_aside_newer
from mxep.train.run_lock import RunLock
from mxep.train.state_precision import StatePrecision
from mxep.train.step import MicrobatchRunner, PendingStep, SkippedSteps, StepClock, StepProfiler, check_capturable, copy_to_host


class Trainer:
    """One run on all ranks; every method is called by all of them together.

    Args:
        config: the options.
        ranks: rank and device of this process.
        out: folder of the run, the same on all ranks.
        lock: the lock of that folder, on rank 0; None if no other run writes there.

    Raises:
        ValueError: the options, the data or (with `config.resume`) the checkpoint are wrong.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, out: Path, lock: RunLock | None = None) -> None:
        self.ranks, self.out, self.lock = ranks, out, lock
        self.settings = s = resolve(config, ranks.device.type, ranks.world)
        self.config = choose_linears(keep_model(config, s), s.shape, s.forward_tokens, ranks.device)
        if config.attn_implementation == "flash_attention_4":
            check_flash_attention_4("--attn-implementation", ranks.device)
        self.precision = state_precision(config)
        check_fits(s.model, s.shape, s.degrees, ranks.world, ranks.device, ranks.local_world, self.precision, config.optimizer_in_backward)
        self._check_equal("model", "shapes", (self.config.shape, self.config.yarn))
        build = build_options(self.config)
        self.recipe = build.recipe
        self.gemm_path = resolve_gemm_path(self.recipe.gemm_path, ranks.device) if self.recipe.gemm == "mxfp8" else None
        self.tokenizer = load_tokenizer(config.tokenizer)
        manifest = open_checkpoint(out / CHECKPOINTS, config.resume_step) if config.resume else None
        self.stage: dict[str, Difference] = {}  # differences from the run so far, by name
        if manifest is not None:
            factors = {"data-parallel ranks": s.data_world, "--batch": s.batch, "--accumulate": config.accumulate}
            self.stage |= stage_changes(manifest, self._identity(), config.named_changes(), self._legacy_identity(), factors)
            if manifest.step >= s.steps:
                raise ValueError(f"resume: {manifest.path} has all {manifest.step} of {s.steps} steps; ask for more with --steps")
        self.shape = routed_as_asked(s.shape, config)
        if self.tokenizer.vocab_size > self.shape.vocab_size:
            raise ValueError(f"train: {self.tokenizer.vocab_size} tokens do not fit {s.model}'s vocabulary of {self.shape.vocab_size}")
        self.chat = ChatRows(self.tokenizer, config.assistant_only_loss, config.data_field) if config.chat else None
        self.corpus = self._load_corpus()
        if manifest is not None:
            self.stage |= stage_changes(manifest, {"data": self.corpus.fingerprint}, config.named_changes(), {}, {})
        self.meshes = build_meshes(ranks.world, s.degrees, ranks.device.type)
        self.transport = self._transport()
        if config.cuda_graph:
            check_capturable(ranks.device, None if self.transport is None else self.transport.name)
        shard = (self.meshes.data_rank, self.meshes.data_world)
        starts = (self.corpus.train_starts, self.corpus.held_out_starts) if config.mask_documents else (None, None)
        self.sequences = TrainingSequences(self.corpus.train, s.seq_len, s.batch, *shard, config.seed, starts[0])
        self.held_out = held_out_batches(self.corpus.held_out, s.seq_len, s.batch, config.eval_tokens, *shard, starts[1])
        self.recompute: RecomputeChoice | None = None  # of "auto" on GPUs
        if config.activation_checkpoint == "auto" and ranks.device.type != "cpu":
            self.recompute = agree_on_recompute(self.config, s, self.shape, self.recipe, self.meshes, ranks.device)
            build = dataclasses.replace(build, recompute=self.recompute.modes)
        stages = build_stages(self.shape, build, self.meshes, ranks.device, config.seed)
        self.layer_modes = self._layer_modes({number: len(stage.layers) for number, stage in stages.items()})
        self.model = merge_stages(stages)
        shape = (s.batch, s.seq_len)
        self.microbatches = MicrobatchRunner(
            stages, self.meshes, shape, config.accumulate, ranks.device, config.microbatch, config.pp_schedule
        )
        self.optimizer = on_all_ranks(lambda: build_optimizer(self.model, s.lr, config.weight_decay, self.precision, config.seed))
        if config.evaluate and self._count_everywhere(self.held_out)[0] == 0:
            raise ValueError("data: no held-out token is a target; hold out more with --held-out-share or --eval-tokens, or --no-evaluate")
        self.in_backward = OptimizerInBackward(self.optimizer) if config.optimizer_in_backward else None
        self.bias_hook = ExpertBiasHook(self.model.moe_layers(), self.meshes.stage.get_group(), config.pp)
        self.optimizer.register_step_pre_hook(self.bias_hook)
        layers = {name: module for name, module in self.model.named_modules() if isinstance(module, MoE)}
        self.numerics = NumericsWatch(layers, self.meshes.stage.get_group(), self.meshes.pp.get_group() if config.pp > 1 else None)
        projects = build.output.gemm == "mxfp8" and self.model.output is not None
        experts = self.recipe.gemm == "mxfp8" and layers  # a pipeline stage may have dense layers only
        quantized = experts or build.linears is not None or projects
        self.weight_cache = cache_quantized_weights(self.model, self.optimizer) if config.cache_weights and quantized else None
        if self.weight_cache is not None:
            self.weight_cache.captured = config.cuda_graph  # replays change weights: eager steps and evaluation keep nothing
        self.schedule = Schedule(s.lr, s.warmup, s.steps, config.lr_floor, config.decay_ratio, config.decay_type)
        self.writer = CheckpointWriter(out / CHECKPOINTS, config.keep, config.async_checkpoint == "async", TIMEOUT, lock)
        self.graph = StepGraph(ranks.device) if config.cuda_graph else None
        self.clock = StepClock(ranks.device)
        self.skipped = SkippedSteps(config.max_skipped)
        self.step_count = 0
        self.evaluated = 0  # step of the last evaluation
        self.stages: list[dict[str, Any]] = []  # all but the first: {"step": last step before it, "changed": differences}
        self.changes: Changes | None = None  # how this start differs from the resumed run
        self.origin: list[str] = []  # where the initial weights came from if not from the seed
        self.notes: list[str] = []  # about the checkpoint that the run resumes from
        if manifest is not None:
            self._restore(manifest)
        elif config.init_from is not None:
            foreign = f"weights from {config.init_from}; {check_origin(self.tokenizer, config.init_from)}"
            notes = progress_notes(self.ranks.rank == 0)
            self.origin = [foreign, *load_published(self.model, config.init_from, any_yarn=config.yarn != "auto", report=notes)]
        if config.checkpoint:
            self.writer.prepare(self._tensors())

    def _layer_modes(self, layers: Mapping[int, int]) -> Recompute | tuple[Recompute, ...]:
        """What backward recomputes: one mode for all layers, or one for each layer of the whole model.

        `layers`: how many this rank's stages have, by number of the stage.
        """
        mode = self.config.activation_checkpoint
        if mode != "auto":
            return mode
        if self.recompute is None:
            return "none"
        modes = iter(self.recompute.modes)
        mine = {stage: [*islice(modes, count)] for stage, count in layers.items()}
        of_ranks = gather_objects(mine, self.meshes.pp.get_group()) if self.config.pp > 1 else [mine]
        found = {stage: modes for of_rank in of_ranks for stage, modes in of_rank.items()}
        return tuple(mode for stage in sorted(found) for mode in found[stage])

    def _load_corpus(self) -> Corpus:
        """The corpus; raises ValueError if ranks read different text, since machines may have different files."""
        c = self.config
        where: dict[str, Any] = {"field": c.data_field, "chat": self.chat, "validation": c.validation_data, "cache": c.data_cache}
        notes = progress_notes(self.ranks.rank == 0)
        corpus = on_all_ranks(lambda: load_corpus(c.data, self.tokenizer, c.held_out_share, report=notes, **where))
        self._check_equal("data", "text", corpus.fingerprint)
        return corpus

    def _check_equal(self, what: str, read: str, value: Any) -> None:
        """Raise ValueError on all ranks where files differ between machines."""
        found = gather_objects(value)
        other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
        if other is not None:
            raise ValueError(f"{what}: ranks 0 and {other} read different {read}; give every machine the same files")

    def _transport(self) -> Transport | None:
        """The transport of this rank's EP group; None without expert parallelism."""
        if self.settings.ep == 1:
            return None
        group, device = self.meshes.ep.get_group(), self.ranks.device
        if self.config.transport is not None:
            set_transport(self.config.transport, group, device=device)
        return transport_of(group.group_name, device)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the sequences of one step, of all ranks."""
        s = self.settings
        return s.data_world * s.batch * self.config.accumulate * s.seq_len

    def describe(self) -> list[str]:
        """The lines that a run prints before its first step."""
        s, c, corpus, ranks = self.settings, self.config, self.corpus, self.ranks
        total, active = self.shape.parameters()
        source = ", ".join(c.data) or "Python standard library"
        where = f"{ranks.world} {ranks.device.type} ranks" if ranks.world > 1 else f"1 {ranks.device.type} rank"
        compute = f"{'bf16' if ranks.device.type == 'cuda' else 'float32'} compute, {describe_state(self.precision)}"
        compute += "" if self.gemm_path is None else f", GEMM path {self.gemm_path}"
        compute += "" if not c.cuda_graph else ", steps as a CUDA graph"
        if not c.fused_layer:
            compute += ", MoE layers in separate blocks" + ("" if c.fused_experts else ", experts GEMM by GEMM")
        model = self.model if c.pp == 1 else build_whole(self.shape, build_options(c))  # this rank has the layers of its stages only
        layers = model.moe_layers()
        masked = ", attention within documents" if c.mask_documents else ""
        masked += ", attention by FlashAttention-4" if c.attn_implementation == "flash_attention_4" else ""
        converted = sum(layer.experts.recipe == self.recipe for layer in layers)
        which = "" if c.mx_fqns == "experts" else f" in {converted} of {len(layers)} layers"
        output = resolve_recipe(c.output_recipe)
        which += f", output projection in {output.name}" if output.gemm == "mxfp8" else ""
        over = "all of them" if c.pp == 1 else "the ranks of each stage"
        shared = f"FSDP2 over {over}" if isinstance(self.microbatches.model, FSDPModule) else "no FSDP"
        shared = f"{c.dp_replicate} replicas, FSDP2 inside them" if c.dp_replicate > 1 else shared
        stages = c.pp * stages_per_rank(c.pp_schedule)
        shared += f", {stages} stages of layers over {c.pp} (PP, {c.pp_schedule})" if c.pp > 1 else ""
        shared += f", attention and dense FFN over {c.tp} (TP)" if c.tp > 1 else ""
        transport = "" if self.transport is None else f" by {self.transport.name} transport"
        return [
            f"model {s.model}: {total:,} parameters, {active:,} used by a token; recipe {self.recipe.name}{which}, {compute}",
            f"ranks {where}: {shared}, experts over {s.ep} (EP){transport}; {self.tokens_per_step:,} tokens a step",
            *describe_linears(model, c),
            *describe_recompute(c, self.recompute, ranks.device),
            describe_router(self.shape, ranks.device.type),
            f"data {source}: {corpus.num_train_documents:,} documents, {len(corpus.train):,} tokens ({self.tokenizer.name}){masked}",
            f"held out {corpus.num_held_out_documents:,} documents, {len(corpus.held_out):,} tokens",
            *([] if self.chat is None else describe_chat(corpus, s.seq_len)),
            f"run {self.out}",
            *describe_peak(peak_bf16_flops(ranks.device)),
            *describe_model(s),
            *self.origin,
            *describe_schedule(self.schedule),
            *describe_mapped(c),
            *(
                [f"--profile-step={c.profile_step} changes nothing: the run has taken {self.step_count} steps"]
                if c.profile_step is not None and c.profile_step <= self.step_count
                else []
            ),
            *(never_used(c, s.choice.shape, s.steps, s.seq_len) if c.resume else ()),
            *([str(model)] if c.print_model else []),
        ]

    def facts(self) -> dict[str, Any]:
        """Facts about the run that are not options: ranks, device, the GPU's peak, transport, model, data.

        `gemm_path`: of the experts, None for bf16.  `recompute`: the mode of each layer of this rank that `--activation-checkpoint auto`
        chose, None if it chose none.
        """
        corpus, (total, active) = self.corpus, self.shape.parameters()
        return {
            "world": self.ranks.world,
            "device": self.ranks.device.type,
            "gemm_path": self.gemm_path,
            "peak_bf16_flops": peak_bf16_flops(self.ranks.device),
            "transport": None if self.transport is None else self.transport.name,
            "recompute": None if self.recompute is None else list(self.recompute.modes),
            "model": {"name": self.settings.model, "parameters": total, "active_parameters": active},
            "data": {
                "documents": corpus.num_train_documents,
                "tokens": len(corpus.train),
                "held_out_documents": corpus.num_held_out_documents,
                "held_out_tokens": len(corpus.held_out),
                "held_out_bytes": None if self.chat is not None else corpus.held_out_bytes,
                "unit": self.tokenizer.unit,
                "tokenizer": {"name": self.tokenizer.name, "fingerprint": self.tokenizer.fingerprint},
                "fingerprint": corpus.fingerprint,
            },
        }

    def train(self) -> bool:
        """Train until the last step or a signal, then write a checkpoint and the plot. True if all steps are done.

        Raises:
            FloatingPointError: more than `max_skipped` steps in a row were skipped; the checkpoint holds the weights from before them.
                Or what `_read` raises.
        """
        s, c, rank = self.settings, self.config, self.ranks.rank
        begin = partial(self._begin_again, self.step_count) if c.resume else None
        log = MetricsLog(self.out, s.steps, self.step_count, c.log_every, rank == 0, self.tokenizer.unit, c.tensorboard, begin)
        if rank == 0 and not c.resume:  # nothing refuses the start from here on
            self.out.mkdir(parents=True, exist_ok=True)
            save_config(c, self.out)
        profiler = StepProfiler(self.out, c.profile_step, c.profile_steps, rank, self.ranks.device, c.profile_host)
        request = StopRequest()
        with stop_signals(request), GarbageCollection(c.gc_freq) as garbage, log, self.writer:
            for line in self.describe():
                log.say(line)
            log.write("run", step=self.step_count, settings=self.config.to_json(), **self.facts())
            if self.step_count:
                for line in (f"resumed at step {self.step_count}", *self.notes):
                    log.say(line)
            if self.changes is not None and self.changes.lines:
                for line in self.changes.lines:
                    log.say(line)
                log.write("change", **dataclasses.asdict(self.changes))
            saved, stopped, kept_weights = self.step_count, False, self._steps_taken() if self.step_count else -1  # -1: no checkpoint
            if self.step_count != self.evaluated:  # the run may have been stopped before this evaluation
                self._evaluate_into(log)
            pending: PendingStep | None = None  # the previous step; its figures are read after the next one is launched
            while self.step_count < s.last_step and not stopped:
                profiler.before(self.step_count + 1)
                counts = c.numerics_every is not None and (self.step_count + 1) % c.numerics_every == 0
                try:
                    with self.numerics.counting() if counts else nullcontext():
                        launched = self.step()
                except Exception as error:
                    if isinstance(error, torch.OutOfMemoryError):
                        error.add_note(out_of_memory_note(c))
                    self._log_finished(pending, log)
                    raise
                if pending is not None:
                    self._read(pending, log)
                stopped = request.anywhere() or self.skipped.stop is not None  # after the wait in _read, to notice a signal during it
                pending = launched
                garbage.after(self.step_count)
                self._log_lost_checkpoints(log)
                ends = stopped or self.step_count == s.last_step
                saves = c.checkpoint and self.step_count % s.checkpoint_every == 0
                if not (ends or saves or counts or self._evaluates() or profiler.waits(self.step_count)):
                    continue
                self._read(pending, log)
                pending = None
                stopped = stopped or self.skipped.stop is not None
                ends = stopped or self.step_count == s.last_step
                self.clock.interrupt()
                garbage.collect()
                for counted in self.numerics.records() if counts else ():
                    log.write("numerics", step=self.step_count, **counted)
                traced = profiler.after(self.step_count, ends)
                if traced is not None:
                    log.say(traced)
                if not stopped or self.step_count == s.steps:  # a finished run is not resumed, so it is evaluated now
                    self._evaluate_into(log)
                again = kept_weights == self._steps_taken() and (self.skipped.stop is not None or not ends)
                same_weights = again and self._is_saved()
                # The same weights are not saved again: that would delete an older, different checkpoint.
                if c.checkpoint and (ends or saves) and not same_weights:
                    self._begin_save()
                    saved, kept_weights = self.step_count, self._steps_taken()
            assert not c.checkpoint or saved == self.step_count or self.skipped.stop is not None
            self.writer.wait()
            self._log_lost_checkpoints(log)
            plot = log.plot()
            kept = f"checkpoint {self.out / CHECKPOINTS}" if c.checkpoint else "no checkpoint (--no-checkpoint)"
            log.say(f"{kept}, metrics {self.out / METRICS_FILE}" + ("" if plot is None else f", plot {plot}"))
            if self.step_count < s.steps and c.checkpoint:
                resume = f"mxep train --resume --out {shlex.quote(str(self.out))}"
                log.say(f"stopped after step {self.step_count} of {s.steps}; resume with: {resume}")
            if self.skipped.stop is not None:
                raise FloatingPointError(self.skipped.stop)
        return self.step_count == s.steps

    def _begin_again(self, step: int) -> Iterator[str]:
        """Make the folder that of a run that resumes from `step`, once its first step has shown that it can."""
        yield from set_aside_newer(self.out, step)
        save_config(self.config, self.out)

    def _evaluates(self) -> bool:
        """True if an evaluation is due after this step."""
        due = self.step_count == self.settings.steps or self.step_count % self.settings.eval_every == 0
        return due and self.config.evaluate

    def _evaluate_into(self, log: MetricsLog) -> None:
        """Evaluate and log, if an evaluation is due."""
        if not self._evaluates():
            return
        log.held_out(self.step_count, *self.evaluate(), None if self.chat is not None else self.corpus.tokens_per_byte)
        self.evaluated = self.step_count

    def _is_saved(self) -> bool:
        """Waits for the last checkpoint; True if it is complete. The same on all ranks."""
        try:
            self.writer.wait()
        except Exception:  # the end of the run reports it
            return False
        return True

    def _log_lost_checkpoints(self, log: MetricsLog) -> None:
        """Print and log each checkpoint that could not be written; the next one is still tried."""
        for lost in self.writer.lost():
            if not isinstance(lost, OSError):  # a bug, or a lock that was lost: the next checkpoint would fail too
                raise lost
            log.say(f"{lost}; the next checkpoint is tried in its turn")
            log.write("lost_checkpoint", step=self.step_count, reason=str(lost))

    def step(self) -> PendingStep:
        """Launch one optimizer step over `accumulate` microbatches; returns what `finish` reads. A non-finite gradient skips the update."""
        self.clock.begin()
        self.model.train()
        batches = [self.microbatches.pinned(self.sequences.next_batch()) for _ in range(self.config.accumulate)]
        valid, attended = self._count_everywhere(batches)
        lr = self.schedule.at(self.step_count)
        update = self._update if self.graph is None else partial(self.graph, self._update)
        figures = update(batches, *(torch.full((), value, dtype=torch.float32, device=self.ranks.device) for value in (valid, lr)))
        self.step_count += 1
        return PendingStep(self.step_count, lr, valid, attended, copy_to_host(figures), self.clock.end())

    def _update(self, batches: Sequence[Batch], valid: Tensor, lr: Tensor) -> Tensor:
        """Forward, backward and the optimizer's step; no value is read on the host. Returns `PendingStep.figures`, on the device.

        Args:
            batches: one for each microbatch.
            valid, lr: () float32 on the device, as in `PendingStep`.
        """
        c = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.in_backward is None:
            loss_sum = self.microbatches.backward(batches, valid).double()
            grad_norm = gradient_norm(self.model.parameters(), c.pp).to(self.ranks.device)
            # As with a GradScaler: the step divides by grad_scale, and skips its update if found_inf is set. The norm is of all ranks.
            self.optimizer.grad_scale = clipping_divisor(grad_norm, c.max_grad_norm)
            self.optimizer.found_inf = (~torch.isfinite(grad_norm)).float()
        else:
            loss_sum = self.microbatches.backward(batches, valid, self.in_backward.decide).double()
            grad_norm = self.in_backward.norm()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss_sum)
        return torch.stack([loss_sum, grad_norm, *self.bias_hook.load(self.ranks.device)])

    def _count_everywhere(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """(number of targets, mean over the ranks of `attended_tokens`)."""
        counts = torch.tensor([self.microbatches.count_valid(batches), self.microbatches.attended_tokens(batches)], dtype=torch.float64)
        dist.all_reduce(counts)
        return float(counts[0]), float(counts[1]) / self.ranks.world

    def _log_finished(self, pending: PendingStep | None, log: MetricsLog) -> None:
        """After an error: log the previous step if it has finished. Does not wait for it, since another rank may be gone."""
        with suppress(Exception):  # after a CUDA error every query fails
            if pending is not None and pending.lap.ended():
                self._read(pending, log)

    def _read(self, launched: PendingStep, log: MetricsLog) -> None:
        """Wait for a step and log it.

        Raises:
            FloatingPointError: with `--optimizer-in-backward`, a gradient that is not finite though the loss is.
        """
        record = self.finish(launched)
        if self.in_backward is not None and math.isfinite(record.loss) and not math.isfinite(record.grad_norm):
            raise FloatingPointError(
                f"train: step {record.step}: gradient norm {record.grad_norm}, loss {record.loss}; --optimizer-in-backward had updated "
                "weights by then, so they are not saved: resume from the last checkpoint with a lower --lr, or without that option"
            )
        skipped = self.skipped.count(record.step, record.grad_norm, record.loss, record.valid_tokens)
        if skipped is None:
            log.step(record)
        else:
            log.skipped_step(skipped)

    def _steps_taken(self) -> int:
        """Launched steps minus those known to be skipped; exact once the figures of all steps are read."""
        return self.step_count - self.skipped.total

    def finish(self, launched: PendingStep) -> StepRecord:
        """Wait for a step; returns its figures. All ranks get the same loss, norm and load.

        Raises:
            RunLockLostError: another run has taken the folder over, on rank 0.
        """
        device, seconds = self.ranks.device, launched.lap.seconds()
        loss_sum, grad_norm, max_over_mean, dead = launched.figures.tolist()
        if self.lock is not None:
            self.lock.confirm()  # before anything about this step is written
        memory_gib, memory_share = memory_in_use(device, 0 if self.transport is None else self.transport.nbytes())
        tokens_per_s = self.tokens_per_step / seconds
        tps = tokens_per_s / self.ranks.world
        flops = flops_per_token(self.shape, launched.attended, self.layer_modes, self.config.fused_layer)
        peak = peak_bf16_flops(device)
        mfu, mfu_causal, hfu = (
            None if peak is None else tps * of_token / peak for of_token in (flops.model, flops.model_causal, flops.hardware)
        )
        return StepRecord(
            step=launched.step,
            loss=loss_sum / launched.valid if launched.valid else math.nan,
            grad_norm=grad_norm,
            lr=launched.lr,
            tokens_per_s=tokens_per_s,
            valid_tokens=round(launched.valid),
            step_s=seconds,
            memory_gib=memory_gib,
            memory_share=memory_share,
            load_max_over_mean=max_over_mean,
            dead_experts=round(dead),
            tps=tps,
            tflops=tps * flops.model / 1e12,
            mfu=mfu,
            mfu_causal=mfu_causal,
            hfu=hfu,
        )

    def evaluate(self) -> tuple[float, int]:
        """(mean held-out loss in nats per token, number of tokens), the same on all ranks."""
        self.model.eval()
        total = torch.tensor([self.microbatches.evaluate(self.held_out), self.microbatches.count_valid(self.held_out)], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1]), int(total[1])

    def _tensors(self) -> dict[str, Tensor]:
        """All replicated or sharded state: parameters, expert biases, the optimizer's moments."""
        model = {f"model.{name}": tensor.detach() for name, tensor in self.model.state_dict().items()}
        return {**model, **{f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(self.model, self.optimizer).items()}}

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a run to resume exactly; see `mxep.train.resume` for what may change."""
        s, c = self.settings, self.config
        return {
            "model": s.model,
            "shape": c.shape,
            "yarn": c.yarn,
            "seq_len": s.seq_len,
            "sequences_per_step": s.data_world * s.batch * c.accumulate,
            "seed": c.seed,
            **({} if c.validation_data else {"held_out_share": c.held_out_share}),
            "optimizer": c.optimizer,
            "dtype": c.dtype,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def _legacy_identity(self) -> dict[str, Any]:
        """The parts of the identity that older runs did not save."""
        yarn = "off" if self.settings.choice.shape.yarn is None else "on"
        moments = vars(StatePrecision())
        return {"tokenizer": ByteTokenizer.fingerprint, "shape": self.config.shape, "yarn": yarn, **moments}

    def save(self) -> Path:
        """Write a checkpoint and wait for it. Raises OSError if it cannot be written."""
        self._begin_save()
        self.writer.wait()
        return find_checkpoint(self.out / CHECKPOINTS)

    def _begin_save(self) -> None:
        generators = {"cpu": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.ranks.device)
        facts = {
            "settings": self.config.to_json(),
            "identity": {**self._identity(), "data": self.corpus.fingerprint},
            "schedule": vars(self.schedule),
            "windows": self.sequences.state_dict(),
            "stages": self.stages,
            "evaluated": self.evaluated,
            "skipped": self.skipped.state_dict(),
            "world": self.ranks.world,
            "torch": torch.__version__,
        }
        self.writer.save(self.step_count, self._tensors(), generators, facts)

    def _restore(self, manifest: Manifest) -> None:
        """Load the state of a checkpoint. Raises ValueError if it has another shape or is damaged."""
        own = load_checkpoint(manifest, self._tensors())
        if self.weight_cache is not None:
            self.weight_cache.advance()
        self.step_count = manifest.step
        self.evaluated = typed(manifest.facts.get("evaluated", manifest.step), int, f"checkpoint: {manifest.path}: evaluated")
        self.skipped.load_state_dict(manifest.facts.get("skipped", {"total": 0, "in_a_row": 0}))  # older checkpoints lack it
        for state in self.optimizer.state.values():
            state["step"].fill_(float(self._steps_taken()))  # of AdamW's bias correction
        if keeps_order(self.stage):
            self.sequences.load_state_dict(typed(manifest.facts.get("windows"), dict, f"checkpoint: {manifest.path}: windows"))
        self.changes = find_changes(manifest, self.config, self.schedule, self.stage)
        self.stages = [*manifest.facts.get("stages", []), *([{"step": manifest.step, "changed": self.stage}] if self.stage else [])]
        if "cpu" in own:
            torch.set_rng_state(own["cpu"])
        if "cuda" in own and self.ranks.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], self.ranks.device)
        self.notes = list(manifest.notes)
