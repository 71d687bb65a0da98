"""What a run needs of a machine's memory, of the host and of each device, by how many experts are trained there.

Pure. Of what is trained (T parameters) and what is frozen (F), the place where steps are taken holds 16·T + b·F
bytes, beside what a step or a validation needs for a while. The host holds 20 bytes of every parameter, whoever
trains it: Θ_final, the view, the anchor, the error feedback, and the array that a fold makes.

Figures were compared with workers that trained, folded and validated: on a CPU those of all presets up to `50m`,
on a GPU `10m` and `50m` (docs/memory.md). Others follow from the tensors that are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from atoll.node.config.devices import devices_of
from atoll.protocols.ledger.coverage import largest_payload
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.zeroth_order import is_scalar

if TYPE_CHECKING:  # a worker asks what fits its device, and has no config
    from atoll.node.config.node_config import NodeConfig

TRAINED_BYTES = 16
"""Bytes of a trained parameter on its device: weight, gradient and two moments in float32."""
MOMENT_BYTES = 4
"""Of a value that Muon moves, the second of the two moments is not there."""
QUANTIZED_BYTES = 1 + 4 / 256
"""The same in eight bits: a code, and its share of a block's scale."""
_QUANTIZED_SLAB = 32 << 20
"""Of what is float32 for a while when moments are in eight bits, but for the largest matrix of Muon."""
_MUON_ARRAYS = 20
"""Bytes of a value of the largest matrix, while Muon moves it: its direction, and products with it."""
FROZEN_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
FOLD_BYTES = 20
"""Bytes of a parameter on the host."""
SEEN_BYTES = 12
"""The same where nothing is trained: Θ_final, the view, and the array that a fold makes."""
MOMENTUM_BYTES = 16
"""More of each parameter for each outer momentum: in Θ_final, the view and what a fold makes, and the mean."""
MEMORY_BYTES = 4
"""More of each parameter that is trained for what a rule keeps beside the error feedback."""
_WEIGHT_BYTES, _TAKEN_BYTES = 4, 12
"""Taken: weight and moments of what is trained, on the host while the experts change hands."""
_CAST_BYTES = 2
"""Bytes of a weight in bfloat16, as an accelerator multiplies it."""
_EXCHANGE_BYTES = 8
"""Bytes of a value of the arena where contributions are encoded: error feedback and anchor."""
_SLAB_CHUNKS = 1 << 14
"""Chunks of local weights that an encoder on a device reads at once."""
_CPU_BASE_BYTES = 436 << 20
_RELAY_BYTES = 160 << 20
"""Of a node without a worker: its daemon and the host process."""
_GPU_HOST_BASE_BYTES = 1 << 30
_GPU_BASE_BYTES = 800 << 20
_GAPS = 1.3
"""What steps of a mixture take of the heap, over what they hold: an expert has other rows in each step, and what
was left by arrays of one size does not fit those of the next. Measured."""
VALIDATED_TOKENS = 2048
"""Tokens at once, or one sequence (node/learning/inner/evaluate.py)."""
_SLAB_VALUES, _SLAB_TOKENS = 1 << 23, 512
"""Logits at once, of at least so many tokens (node/learning/model/token_loss.py)."""


class Free(msgspec.Struct, frozen=True):
    """Free resources of a machine, in bytes."""

    memory_bytes: int
    disk_bytes: int
    gpu_bytes: int | None = None
    """Free memory of the fullest GPU; None without a GPU, or if no tool reports it."""


class Needs(msgspec.Struct, frozen=True):
    """Most bytes of memory that a run needs at once."""

    host: int
    """Memory of the host, of all processes together."""
    device: int
    """Memory of each GPU; 0 where steps are taken on the CPU."""


def parts_of(model: ModelSpec, experts: int | None = None) -> tuple[int, int]:
    """(T, F): parameters that are trained, and frozen, with this many experts of each layer; None: all."""
    if model.lora_rank:
        return model.parameters, model.base.parameters
    if not model.expert_count or experts is None:
        return model.parameters, 0
    frozen = (model.expert_count - experts) * model.layers * _expert(model)
    return model.parameters - frozen, frozen


def muon_parameters(spec: RunSpec, experts: int | None = None) -> int:
    """Parameters trained here that Muon moves (protocols/run/moments.py: is_orthogonalized)."""
    if spec.inner.optimizer != "muon":
        return 0
    model = spec.model
    attention = 2 * model.dim * (model.heads + model.kv_heads) * model.head_dim
    if not model.expert_count:
        return model.layers * (attention + 3 * model.dim * model.ffn)
    count = model.expert_count if experts is None else experts
    return model.layers * (attention + count * _expert(model))


def trained_bytes(spec: RunSpec, experts: int | None = None, *, quantized: bool = False) -> int:
    """Bytes of weights, gradients and moments of all that is trained here. `quantized`: moments in eight bits.

    With privacy also of the sum of clipped gradients, beside the gradient of one sequence.
    """
    trained = parts_of(spec.model, experts)[0]
    moments = 2 * trained - muon_parameters(spec, experts)
    each = QUANTIZED_BYTES if quantized else MOMENT_BYTES
    moments_bytes, sums = int(each * moments), _WEIGHT_BYTES * trained if spec.privacy else 0
    return sums + (TRAINED_BYTES - 2 * MOMENT_BYTES) * trained + moments_bytes


def needs_of(spec: RunSpec, config: NodeConfig, experts: int | None = None) -> Needs:
    """Memory with `experts` experts of each layer trained here; None: all. `config.device` must not be `auto`.

    Of a node that does not train, what its roles need; one that takes zeroth-order steps needs as much as one
    that validates, because its steps are forward passes of as many tokens.

    With `micro_batch` 0 and `recompute` `auto` the least that will do: one sequence at once, layers recomputed.
    `optimizer_states` `auto` counts as `float32`; see `states_of` (node/runs/capacity/free_resources.py).
    """
    if not config.work.trains or is_scalar(spec):
        return _needs_to_observe(spec, config)
    trained, frozen = parts_of(spec.model, experts)
    held, saved = (
        trained_bytes(spec, experts, quantized=_is_quantized(config)),
        MOMENT_BYTES * muon_parameters(spec, experts),
    )
    shelf, devices = FROZEN_BYTES[config.frozen] * frozen, devices_of(config.device)
    taken = _TAKEN_BYTES * trained - saved if splits(spec) else 0
    each = FOLD_BYTES + MOMENTUM_BYTES * spec.outer.momenta + MEMORY_BYTES * _memories(spec)
    folds = each * _shared_values(spec.model)
    if devices[0] == "cpu":
        each = _CPU_BASE_BYTES + held + shelf
        # What a step gave back is not all there for the validation: the heap keeps some of it.
        steps = _pass_bytes(spec, config, experts, cast=False) * (_GAPS if spec.model.experts else 1)
        work = len(devices) * int(steps) + _validation(spec.model)
        return Needs(len(devices) * each + folds + max(work, taken), 0)
    built = _GPU_HOST_BASE_BYTES + _WEIGHT_BYTES * trained + shelf
    whole = held + shelf if config.shard else 0
    return Needs(len(devices) * built + folds + taken + whole, _gpu_bytes(spec, config, experts))


def _needs_to_observe(spec: RunSpec, config: NodeConfig) -> Needs:
    """Memory of a node without gradients and moments: the module, a forward pass, and what folds take."""
    if not config.work.has_model:
        return Needs(_RELAY_BYTES, 0)
    trained, frozen = parts_of(spec.model, 0)
    module = _WEIGHT_BYTES * trained + FROZEN_BYTES[config.frozen] * frozen
    folds = (SEEN_BYTES + MOMENTUM_BYTES * spec.outer.momenta) * _shared_values(spec.model)
    if devices_of(config.device)[0] == "cpu":
        return Needs(_CPU_BASE_BYTES + module + folds + _validation(spec.model), 0)
    passes = _validation(spec.model) + _cast(spec.model, config)
    return Needs(_GPU_HOST_BASE_BYTES + module + folds, _GPU_BASE_BYTES + module + passes)


def _shared_values(model: ModelSpec) -> int:
    """Values of a state. Matrices of a package's model may be as narrow as a convolution's: padding counts."""
    return model.parameters if model.plugin is None else arena_of(model).chunks * CHUNK


def _memories(spec: RunSpec) -> int:
    return spec.compress.memories(spec.outer.momenta)


def encoder_bytes(spec: RunSpec) -> int:
    """Bytes that a device needs to encode contributions (node/worker/encoding/), for all experts."""
    chunks, k = arena_of(spec.model).chunks, spec.compress.most_k
    # Of each chunk: twice as many candidates as a power of two above k, with their values; places, values, order
    # and codes of k; unary bits.
    each = 4 * CHUNK + 16 * (1 << (k - 1).bit_length()) + 13 * k + CHUNK // 16
    held = _EXCHANGE_BYTES + MEMORY_BYTES * _memories(spec)
    return held * CHUNK * chunks + each * min(chunks, _SLAB_CHUNKS) + largest_payload(spec)


def memory_shortage(spec: RunSpec, free_bytes: int, *, spare: bool) -> str:
    """Why a device with `free_bytes` cannot hold error feedback and anchor, as text; empty if it can.

    `spare`: it must have twice what these and training together need (16 bytes a parameter).
    """
    own = encoder_bytes(spec)
    need = 2 * (own + trained_bytes(spec)) if spare else own
    if need <= free_bytes:
        return ""
    return f"it has {free_bytes / 1e9:.1f} GB free, and {need / 1e9:.1f} GB are wanted for that"


def activation_bytes(
    model: ModelSpec,
    sequences: int,
    experts: int | None = None,
    *,
    recompute: bool = False,
    cast: bool = False,
) -> int:
    """Most bytes that passes of `sequences` sequences hold: the tensors saved for the backward pass, and what the
    pass needs for one layer and a slab of logits. `recompute`: of all layers but one the input alone is saved.
    `cast`: products are taken in bfloat16, as on a GPU."""
    if model.plugin is not None:
        return _WEIGHT_BYTES * model.plugin.saved * sequences
    layer = saved_bytes(model, experts, cast=cast)
    saved = model.layers * 4 * model.dim + layer if recompute else model.layers * layer
    tokens = model.context * sequences
    # Of the head there are two gradients beside the one that is kept: its own and the embeddings'.
    head = _slab(model, tokens, cast=cast) + 2 * _WEIGHT_BYTES * model.vocab * model.dim
    return tokens * (saved + 4 * (_passing(model) + 2 * model.dim)) + head


def saved_bytes(model: ModelSpec, experts: int | None = None, *, cast: bool = False) -> int:
    """Bytes that autograd saves of one layer and token, without copies of weights: residuals and norms, attention,
    and feed-forward. `cast`: as on a GPU, where a layer with some trained experts saves the input of all rows
    (node/learning/model/expert_functions.py). Tests compare it with autograd's own tensors."""
    product, dim = 2 if cast else 4, model.dim
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = 4 * 8 * dim + 3 * product * wide
    if model.qk_norm:
        attention += (6 + product) * (wide + narrow)
    if model.lora_rank:  # the inputs of frozen products are saved by the factors A; of adapters, what A gives
        attention += product * model.lora_rank * len(model.lora_sides)
    if model.experts is None:
        # Of frozen FFN slices only the pre-activations of gate and up are saved, and no input.
        ours = model.ffn if experts is None else experts * model.slice_ffn
        return attention + 2 * product * (model.ffn + ours) - (0 if ours else 4 * dim)
    rows, count = model.experts.per_token * dim, model.experts.count
    ours = count if experts is None or (cast and experts) else experts
    return attention + 2 * product * model.ffn + 4 * rows + -(-product * rows * ours // count)


def _gpu_bytes(spec: RunSpec, config: NodeConfig, experts: int | None) -> int:
    """Bytes on each GPU. The allocator gives a step's memory to the validation: the larger of the two counts."""
    trained, frozen = parts_of(spec.model, experts)
    devices, model = len(devices_of(config.device)), spec.model
    whole = devices > 1 and not config.shard  # gradients lie in buckets for the other devices
    shelf = 0 if config.frozen_on_host else FROZEN_BYTES[config.frozen] * frozen
    kept = (
        trained_bytes(spec, experts, quantized=_is_quantized(config)) // (devices if config.shard else 1) + shelf
    )
    step = _pass_bytes(spec, config, experts, cast=True) + _cast(model, config)
    validation = _validation(model) + _cast(model, config) + (_WEIGHT_BYTES * trained if whole else 0)
    kept += encoder_bytes(spec) if config.exchange_on == "device" and not config.shard else 0
    return _GPU_BASE_BYTES + kept + max(step, validation)


def _pass_bytes(spec: RunSpec, config: NodeConfig, experts: int | None, *, cast: bool) -> int:
    """What a step's passes hold: of one sequence at once, and recomputed, unless the config says otherwise."""
    if spec.privacy:  # each sequence passes alone, whatever the config says
        config = msgspec.structs.replace(config, micro_batch=1)
    devices, recompute = len(devices_of(config.device)), config.recompute != "off"
    here, fewest = -(-spec.inner.batch // devices), max(1, spec.inner.batch // devices)
    # All devices make as many passes: one that has a sequence more takes two in one of them.
    passes = min(-(-here // (config.micro_batch or 1)), fewest)
    held = activation_bytes(spec.model, -(-here // passes), experts, recompute=recompute, cast=cast)
    held = max(held, _optimizer_bytes(spec, config))  # a step's passes are over when its matrices move
    if devices == 1 or config.shard or passes == 1:
        return held
    # Until the last pass a device's own gradients lie beside the buckets in which those of all are summed.
    return held + _WEIGHT_BYTES * parts_of(spec.model, experts)[0]


def _is_quantized(config: NodeConfig) -> bool:
    """Whether moments are in eight bits. With `auto` they are not: `states_of` says when they are."""
    return config.optimizer_states == "int8"


def _optimizer_bytes(spec: RunSpec, config: NodeConfig) -> int:
    """What one matrix needs while Muon moves it, or a slab of moments in eight bits while AdamW uses it."""
    slab = _QUANTIZED_SLAB if _is_quantized(config) else 0
    if spec.inner.optimizer != "muon":
        return slab
    model, wide = spec.model, spec.model.heads * spec.model.head_dim
    ffn = model.experts.ffn if model.experts else model.slice_ffn
    largest = model.dim * max(wide, ffn)
    return max(slab, (_MUON_ARRAYS + (2 * MOMENT_BYTES if slab else 0)) * largest)


def _cast(model: ModelSpec, config: NodeConfig) -> int:
    """bfloat16 copies: of all but experts for a whole pass, or recomputed of one layer and the head; of one
    layer's experts, which int8 widens twice."""
    if model.plugin is not None:
        return _CAST_BYTES * model.parameters
    each = _expert(model) * model.expert_count
    head, common = model.vocab * model.dim, model.base.parameters - model.layers * each
    if config.recompute != "off":
        common = head + (common - head) // model.layers
    return _CAST_BYTES * (common + (1 + (config.frozen == "int8")) * each)


def _validation(model: ModelSpec) -> int:
    """A forward pass of one layer, and a slab of logits. The trained weights take the place of gradients."""
    tokens = max(VALIDATED_TOKENS, model.context)
    if model.plugin is not None:
        return _WEIGHT_BYTES * model.plugin.saved * (tokens // model.context)
    return 4 * tokens * (4 * model.dim + _passing(model)) + _slab(model, tokens, cast=False)


def _slab(model: ModelSpec, tokens: int, *, cast: bool) -> int:
    """Logits of as many tokens as have them at once."""
    slab = min(tokens, max(_SLAB_TOKENS, _SLAB_VALUES // model.vocab))
    return slab * model.vocab * (4 + (2 if cast else 0))


def _passing(model: ModelSpec) -> int:
    """Values of one token that a layer's backward pass holds for a while."""
    rows = model.experts.per_token if model.experts else 1
    return 4 * model.ffn + (3 * rows + 1) * model.dim


def _expert(model: ModelSpec) -> int:
    """Parameters of one expert, or of one FFN slice, of one layer; 0 for a model that has neither."""
    width = model.experts.ffn if model.experts else model.slice_ffn if model.ffn_slices else 0
    return 3 * model.dim * width
