"""The Gated DeltaNet part of the seam: exchanges a dispatcher's kernels, keeps raw gates, refreshes parameters."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from qwen35.adapters.sglang import seam
from qwen35.adapters.sglang.seam import Hook
from qwen35.adapters.sglang.seam_calls import EXTENDING, ExtendContext
from qwen35.adapters.sglang.seam_determinism import deterministic, deterministic_note
from qwen35.adapters.sglang.seam_kernel import GdnKernel, kernel_class, stand_in
from qwen35.adapters.sglang.seam_moved import Guard
from qwen35.adapters.sglang.seam_plan import backend_plan, replays_inputs, reserved_pool, union
from qwen35.adapters.sglang.seam_router import PORT, KernelRouter
from qwen35.adapters.sglang.seams.release import Release
from qwen35.domain.capabilities import Phase
from qwen35.domain.errors import ConfigurationError, UnsupportedError
from qwen35.ports.gated_delta_rule import GdnPlan
from qwen35.services.counters import Counters
from qwen35.services.gated_delta_rule import GatedDeltaRuleService

logger = logging.getLogger("qwen35")

#: The dispatcher's kernels, one a phase and one for draft trees.
KERNEL_SLOTS = ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel")
#: Where a dispatcher says that its verify kernel is FlashInfer's; a release may have none.
VERIFY_FLAG = "verify_kernel_is_flashinfer"
#: What hooks read of a backend while it serves, where it is too late to give up.
_read_while_serving = operator.attrgetter("mis_metadata")
MODEL_FAMILY = "qwen3_5"


class GdnSeam:
    """``routes``: which adapter serves which phase; phases without one keep SGLang's own kernel, counted.

    ``service`` is None where nothing is routed. ``strict``: a model that the chosen adapter cannot serve at all stops
    the engine instead of leaving its calls to SGLang's own kernels. ``fallback``: the adapter that serves what a chosen
    one refuses. ``guard``: what our half of a hook does while SGLang builds a backend goes on inside it.
    """

    def __init__(
        self, release: Release, routes: Mapping[Phase, str], service: GatedDeltaRuleService | None, counters: Counters,
        guard: Guard, *, checked: bool = False, strict: bool = False, fallback: str | None = None,
    ) -> None:  # fmt: skip
        self._release, self._counters, self._guard = release, counters, guard
        self._strict, self._fallback = strict, fallback
        self.router = KernelRouter(routes, service, counters, checked)
        self._exchanged: list[tuple[weakref.ref[Any], dict[str, Any]]] = []
        self._switched: list[tuple[weakref.ref[Any], dict[str, Any]]] = []
        self._plan: GdnPlan | None = None
        self.notes: list[str] = []

    @property
    def backends(self) -> int:
        """How many of SGLang's GDN backends had their kernels exchanged."""
        return len(self._exchanged)

    @property
    def unrouted(self) -> str | None:
        """Of an engine that stands: why nothing of its model is routed; None where something may be."""
        return None if self._exchanged else "this model has no Gated DeltaNet layers of Qwen3.5"

    def refuse_unrouted(self) -> None:
        """Raise ``UnsupportedError`` where strict, for phases that are routed of a model that has nothing to route."""
        if self.unrouted is not None:
            self._end_if_strict(self.unrouted)

    def model_line(self) -> str | None:
        """The sizes that the engine's pools have, None where no adapter was prepared for them."""
        plan = self._plan
        if plan is None:
            return None
        g = plan.geometry
        return (
            f"GDN heads {g.key_heads} (q, k) and {g.value_heads} (v) on this rank, widths {g.key_width} and "
            f"{g.value_width}, state {plan.state_dtype}, at most {plan.max_batch} rows, {plan.max_tokens} tokens, "
            f"{plan.max_draft} draft tokens"
        )

    def hooks(self) -> dict[str, Hook]:
        """What to hook, by key of the release's targets."""
        hooks: dict[str, Hook] = {"gdn_backend": self._around_backend}
        if self.router.service is not None:
            hooks["gdn_forward_extend"] = self._around_forward_extend
            hooks |= dict.fromkeys(self._release.weight_updates, self._around_weight_update)
        return hooks

    def restore(self) -> None:
        """Give every live dispatcher its own kernels back, and its backend the gathering that they need.

        Graphs that were captured keep what they captured. The parameter copies that they read are refreshed after
        weight updates as before.
        """
        for reference, originals in (*self._exchanged, *self._switched):
            owner = reference()
            for name, value in originals.items() if owner is not None else ():
                setattr(owner, name, value)
        self._exchanged.clear()
        self._switched.clear()
        service = self.router.service
        if service is not None and service.captured:
            for key in self._release.weight_updates:
                seam.outlive(self._release.targets[key].path, self._around_weight_update)

    def _around_backend(self, original: Callable[..., None], backend: Any, model_runner: Any) -> None:
        original(backend, model_runner)
        with self._guard("gdn_backend"):
            self._take(backend, model_runner)

    def _take(self, backend: Any, model_runner: Any) -> None:
        family = model_runner.model_config.hf_text_config.model_type
        if not family.startswith(MODEL_FAMILY):
            self._end_if_strict(f"{family} is not Qwen3.5")
            self._note(f"{family} is not Qwen3.5: its GDN layers keep SGLang's own kernels, uncounted")
            return
        if deterministic() and (note := deterministic_note(self.router.routes, self._fallback)) is not None:
            self._note(note)
        router, service = self.router, self.router.service
        if service is not None and not self._prepare(service, backend, model_runner):
            router = KernelRouter({}, None, self._counters)
        _read_while_serving(backend)
        self._exchange(backend, router)
        switch = self._release.gather_switch
        if Phase.EXTEND in router.routes and switch is not None:
            self._switched.append((weakref.ref(backend), {switch: getattr(backend, switch)}))
            setattr(backend, switch, False)

    def _end_if_strict(self, reason: str) -> None:
        if self._strict and self.router.routes:
            chosen = ", ".join(f"{phase} by {name}" for phase, name in self.router.routes.items())
            raise UnsupportedError(chosen, [f"{reason} (QWEN35_SGLANG_STRICT)"])

    def _prepare(self, service: GatedDeltaRuleService, backend: Any, model_runner: Any) -> bool:
        """Whether calls of ``backend`` may reach ``service``, which refuses by itself those that it cannot serve."""
        plan = backend_plan(backend, model_runner, gathers_pool=self._release.gather_switch is None)
        plan = plan if self._plan is None else union(self._plan, plan)
        try:
            service.prepare(plan)
        except ConfigurationError as exc:
            if self._strict:
                raise
            # The plan before stays in force, and under its null slot padding would be written into a live slot here.
            self._refused((str(exc),), f"{exc}; this backend's GDN layers keep SGLang's own kernels")
            return False
        except UnsupportedError as exc:
            if self._strict:
                raise
            self._refused(exc.reasons, f"{exc}; the calls in question go to SGLang's own kernels")
        self._plan = plan
        if Phase.VERIFY in self.router.routes and replays_inputs(backend):
            self._note("verify is not routed: ReplaySSM verifies beside the dispatcher")
        return True

    def _refused(self, reasons: tuple[str, ...], note: str) -> None:
        for reason in reasons:
            self._counters.add("plans_refused", port=PORT, adapter=",".join(self.router.routes.values()),
                               reason=reason)  # fmt: skip
        self._note(note)

    def _exchange(self, backend: Any, router: KernelRouter) -> None:
        from sglang.srt.layers.attention.linear.gdn_backend import FLA_CHUNK_SIZE
        from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

        dispatcher = backend.kernel_dispatcher
        originals = {name: getattr(dispatcher, name) for name in KERNEL_SLOTS}
        kind = kernel_class(LinearAttnKernelBase)
        gathers = Phase.EXTEND in router.routes and self._release.gather_switch is not None
        reserved = None if router.service is None else reserved_pool(backend)
        ours: dict[int, GdnKernel] = {
            id(kernel): stand_in(
                kind, LinearAttnKernelBase, kernel, router, chunk=FLA_CHUNK_SIZE, gathers=gathers, reserved=reserved,
            )
            for kernel in originals.values()
        }  # fmt: skip
        exchanges: dict[str, tuple[Any, Any]] = {name: (own, ours[id(own)]) for name, own in originals.items()}
        if Phase.VERIFY in router.routes and VERIFY_FLAG in vars(dispatcher):
            exchanges[VERIFY_FLAG] = (getattr(dispatcher, VERIFY_FLAG), False)
        self._exchanged.append((weakref.ref(dispatcher), {name: own for name, (own, _) in exchanges.items()}))
        # supports_packed_decode stays what SGLang's decode kernel offers: a call that falls back must find its method.
        for name, (_, new) in exchanges.items():
            setattr(dispatcher, name, new)

    def _around_forward_extend(
        self, original: Callable[..., Any], backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any,
        b: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        token = EXTENDING.set(_context(layer, forward_batch, a, b, scoring=backend.mis_metadata is not None))
        try:
            return original(backend, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs)
        finally:
            EXTENDING.reset(token)

    def _around_weight_update(self, original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

        # Weights that were released have no memory behind them: reading them would end the CUDA context.
        released = GPU_MEMORY_TYPE_WEIGHTS in updater.offload_tags
        try:
            result = original(updater, *args, **kwargs)
        except Exception:
            if not released:  # even a failed update may have changed some parameters
                self._refresh_after_error()
            raise
        if GPU_MEMORY_TYPE_WEIGHTS not in updater.offload_tags:
            self._refresh()
        return result

    def _refresh_after_error(self) -> None:
        try:
            self._refresh()
        except Exception as exc:  # noqa: BLE001 - whatever it is, SGLang's caller must get SGLang's own error
            logger.error("qwen35: parameter copies are stale, as their refresh failed: %s: %s", type(exc).__name__, exc)

    def _refresh(self) -> None:
        if self.router.service is not None:
            copies = self.router.service.refresh_parameters()
            self._counters.add("parameter_refreshes", port=PORT)
            logger.info("refreshed %d parameter copies after a weight update", copies)

    def _note(self, text: str) -> None:
        """Say ``text``, once however many backends it is true of."""
        if text not in self.notes:
            self.notes.append(text)
            logger.warning("qwen35: %s", text)


def _context(layer: Any, forward_batch: Any, a: Any, b: Any, *, scoring: bool) -> ExtendContext:
    verify = forward_batch.forward_mode.is_target_verify()
    lengths = None if verify else forward_batch.extend_seq_lens_cpu
    return ExtendContext(
        a=a, b=b, A_log=layer.A_log, dt_bias=layer.dt_bias,
        lengths=None if lengths is None else tuple(int(n) for n in lengths),
        ragged=verify and forward_batch.spec_info.ragged_verify_layout is not None, scoring=scoring,
    )  # fmt: skip
