"""Run windows through a model with one decoder layer in memory, and record each attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantmla.calibrate.record import LayerCapture, Recorder, check_finite
from quantmla.checkpoint.families import family_of
from quantmla.checkpoint.reader import CheckpointReader
from quantmla.errors import CheckpointError
from quantmla.loading import quiet_loading

Progress = Callable[[str, int, int], None]  # (what, done, total)

ATTENTION_NAME = "quantmla_capture"
EMBEDDING_NAME = "model.embed_tokens.weight"
FLOAT16_MAX = 65504.0
LAYER_NUMBER = re.compile(r"model\.layers\.(\d+)\.")


def capture_layers(
    source: str | Path,
    windows: torch.Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
    storage_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    start: tuple[int, torch.Tensor] | None = None,
    skip: Collection[int] = (),
    on_hidden: Callable[[int, torch.Tensor], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[LayerCapture]:
    """Yield the capture of every cache layer in order, streaming the checkpoint layer by layer.

    Drop each capture before asking for the next one, or two of them are in memory at once.

    Args:
        source: MLA checkpoint folder.
        windows [n, T, int64]: token windows.
        compute_dtype: dtype of the forward pass.
        storage_dtype: dtype of hidden states and queries while they wait on the CPU.
        device: where a decoder layer runs.
        start: (decoder layer, its input [n, T, D]) to go on from; None starts at the embeddings.
            The input tensor is overwritten.
        skip: cache layers that are passed through and not yielded.
        on_hidden: called with (decoder layer, its input [n, T, D]) as soon as that input exists,
            before the captures of the layer that made it are yielded.
        progress: called with (what, windows done, windows in all).

    Returns:
        Iterator of LayerCapture.

    Raises:
        CalibrationError: a NaN, an infinity or a float16 overflow appears; the layer is named.
        CheckpointError: tensors of a layer are missing or have a wrong shape.

    Source: own; layer-wise calibration on teacher inputs follows the QuantMLA study.
    """
    reader = CheckpointReader(source)
    family = family_of(reader.config)
    prefixes = family.attention_prefixes(reader.config)
    config = transformers.CONFIG_MAPPING[family.model_type].from_dict(
        {**reader.config, "model_type": family.model_type}
    )
    limit = torch.finfo(torch.float32).max
    if torch.float16 in (compute_dtype, config.dtype):
        limit = FLOAT16_MAX
    first, hidden = start or (0, None)
    wanted = [i for i in range(len(prefixes)) if i not in skip]
    last = max((decoder_of(prefixes[i]) for i in wanted), default=-1)
    for decoder in range(first, last + 1):
        model = load_decoder(reader, config, decoder, compute_dtype, device)
        recorders = {
            module.layer_idx: Recorder(
                module,
                prefixes[module.layer_idx],
                family.norm_eps,
                family.latent_scale(config),
                windows.shape,
                storage_dtype,
                limit,
            )
            for module in _attentions(model)
            if module.layer_idx in wanted
        }
        name = f"model.layers.{decoder}"
        hidden = _run_decoder(model, windows, hidden, storage_dtype, limit, name, progress)
        if on_hidden is not None and decoder < last:
            on_hidden(decoder + 1, hidden)
        captures = [recorders.pop(layer).finish() for layer in sorted(recorders)]
        del model
        while captures:
            yield captures.pop(0)


def decoder_of(prefix: str) -> int:
    """Return the decoder layer number of a tensor name or attention prefix, -1 outside them."""
    match = LAYER_NUMBER.match(prefix)
    return int(match.group(1)) if match else -1


def load_decoder(
    reader: CheckpointReader,
    config: transformers.PretrainedConfig,
    decoder: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Load the base model with one decoder layer, by transformers' own class and conversions.

    The class builds all layers on the meta device and then keeps one, so what a layer derives from
    the depth or its place (dense or expert MLP, residual scale, cache index) is as in the model.

    Args:
        reader: open checkpoint.
        config: config of the whole model.
        decoder: which layer to keep, as `model.layers[0]`.
        dtype: dtype of the weights in memory.
        device: where they go.

    Returns:
        The model; its token embedding is real for layer 0 only.

    Raises:
        CheckpointError: a tensor of the layer is missing or has a wrong shape or type.

    Source: own.
    """
    model_class = transformers.AutoModel._model_mapping[type(config)]

    def build(self, config):
        model_class.__init__(self, config)
        self.layers = nn.ModuleList([self.layers[decoder]])

    # Same module and name, because transformers finds a class's weight conversions by both.
    identity = {"__module__": model_class.__module__, "__init__": build}
    one_layer_class = type(model_class.__name__, (model_class,), identity)
    own, kept = f"model.layers.{decoder}.", "layers.0."
    tensors = {
        kept + name.removeprefix(own): _plain_tensor(reader, name)
        for name in reader.tensor_names
        if name.startswith(own)
    }
    config = type(config).from_dict(config.to_dict())
    if decoder == 0:
        tensors["embed_tokens.weight"] = _plain_tensor(reader, EMBEDDING_NAME)
    else:
        config.vocab_size, config.pad_token_id = 1, None
    where, expected = f"{reader.path}, {own[:-1]}", f"tensors of {model_class.__name__}"
    next_step = "compare config.json with the tensors, or download the checkpoint again"
    with quiet_loading():
        try:
            model, info = one_layer_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                output_loading_info=True,
            )
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise CheckpointError(
                "a decoder layer does not load",
                where=where,
                expected=expected,
                got=reason,
                next_step=next_step,
            ) from error
    missing = sorted(key for key in info["missing_keys"] if key.startswith(kept))
    if missing:
        raise CheckpointError(
            "tensors of a decoder layer are missing",
            where=where,
            expected=expected,
            got="no " + ", ".join(key.replace(kept, own) for key in missing[:4]),
            next_step=next_step,
        )
    return model.to(device).eval()


def _plain_tensor(reader: CheckpointReader, name: str) -> torch.Tensor:
    return reader.get_float(name, reader.shape_of(name))


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.layers[0].modules() if hasattr(module, "kv_a_layernorm")]


@torch.no_grad()
def _run_decoder(
    model: nn.Module,
    windows: torch.Tensor,
    hidden: torch.Tensor | None,
    storage_dtype: torch.dtype,
    limit: float,
    name: str,
    progress: Progress | None,
) -> torch.Tensor:
    """Run all windows through the layer; its outputs [n, T, D] replace `hidden` in place."""
    layer, embedding = model.layers[0], model.embed_tokens.weight
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []

    def observe(_module, _args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    def inject(_module, args, kwargs):
        # What a model does to its embeddings was done once, on the way into the first layer.
        return (inputs.pop(), *args[1:]), kwargs

    layer.register_forward_hook(observe)
    if hidden is not None:
        layer.register_forward_pre_hook(inject, with_kwargs=True)
    result = hidden
    for index in range(windows.shape[0]):
        if hidden is None:
            model(input_ids=windows[index : index + 1].to(embedding.device), use_cache=False)
        else:
            inputs.append(hidden[index : index + 1].to(embedding))
            model(inputs_embeds=inputs[0], use_cache=False)
        output = outputs.pop()[0]
        check_finite(output, limit, name, "layer output")
        if result is None:
            result = torch.empty((windows.shape[0], *output.shape), dtype=storage_dtype)
        result[index] = output
        if progress is not None:
            progress(f"capture {name}", index + 1, windows.shape[0])
    return result


def _recording_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    record = getattr(module, "quantmla_record", None)  # a skipped layer has none
    if record is not None:
        record(query, key, scaling)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


transformers.AttentionInterface.register(ATTENTION_NAME, _recording_attention)
transformers.AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
