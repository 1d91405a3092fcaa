"""DecoderPass: decoders behind `IBatchedForwardPass`. Chooses the implementation for device and task."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.backend.checkpoint.encoders.decoder_heads import read_pooled_decoder
from penstock.backend.checkpoint.files.json_file import read_json_object
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import IBatchedForwardPass, PassOptions, PassSpec
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.pooled_pass import PooledDecoderPass

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass


class DecoderPass(IBatchedForwardPass):
    """The registered pass. It has no instances: `load` returns a pass for the device and the model's task."""

    @classmethod
    def describe(cls, model_dir: Path | None, options: PassOptions) -> PassSpec:
        model_dir = _require(model_dir)
        pooled = read_pooled_decoder(model_dir, options.task, options.max_context_tokens)
        if options.device == "cpu":
            if pooled is not None:
                return PooledDecoderPass.describe_pooled(model_dir, options, pooled)
            return _with_pictures(CpuDecoderPass.describe(model_dir, options), model_dir, options)
        # Imported here, as below: a start on a CPU needs none of it.
        from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
        from penstock.backend.passes.decoder.cuda_pass.pooled_pass import PooledCudaPass

        if pooled is not None:
            return PooledCudaPass.describe_pooled(model_dir, options, pooled)
        return _with_pictures(CudaDecoderPass.describe(model_dir, options), model_dir, options)

    @classmethod
    def load(cls, model_dir: Path | None, options: PassOptions) -> IBatchedForwardPass:
        model_dir = _require(model_dir)
        loaded: CpuDecoderPass | CudaDecoderPass
        pooled = read_pooled_decoder(model_dir, options.task, options.max_context_tokens)
        if options.device == "cpu":
            loaded = (
                CpuDecoderPass.load(model_dir, options)
                if pooled is None
                else PooledDecoderPass.load_pooled(model_dir, options, pooled)
            )
        else:
            from penstock.backend.passes.cuda.device.cuda_device import open_gpu
            from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
            from penstock.backend.passes.decoder.cuda_pass.pooled_pass import PooledCudaPass

            device = open_gpu(options.device)
            loaded = (
                CudaDecoderPass.load(model_dir, options, device)
                if pooled is None
                else PooledCudaPass.load_pooled(model_dir, options, pooled, device)
            )
        if pooled is None and _has_pictures(model_dir):
            from penstock.backend.passes.vision.tower import VisionTower

            loaded.picture_tower = VisionTower.load(model_dir, options)  # it takes turns with the steps
        elif pooled is None and isinstance(loaded, CpuDecoderPass) and options.may_run_ahead:
            loaded.run_ahead()
        # They differ from the interface only in the parameters of their class methods.
        return cast("IBatchedForwardPass", loaded)

    @classmethod
    def shared_bytes(cls, model_dir: Path, options: PassOptions) -> int:
        """Size of the weights that `load` would map; see `IFindsSharedWeights`."""
        if options.device == "cpu":
            return CpuDecoderPass.shared_bytes(model_dir, options)
        from penstock.backend.passes.cuda.device.cuda_device import uuid_of
        from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass

        return CudaDecoderPass.shared_bytes(model_dir, options, uuid_of(options.device))


def _has_pictures(model_dir: Path) -> bool:
    """Also of a GGUF file's directory, where the vision part's config is under a key of its own."""
    return not {"vision_config", "vision_model"}.isdisjoint(read_json_object(model_dir / CONFIG_FILE))


def _with_pictures(spec: PassSpec, model_dir: Path, options: PassOptions) -> PassSpec:
    if not _has_pictures(model_dir):
        return spec
    from penstock.backend.passes.vision.tower import with_pictures

    return with_pictures(spec, model_dir, options)


def _require(model_dir: Path | None) -> Path:
    if model_dir is None:
        raise StartupError("the decoder pass needs a model: give --model a directory or a hub id")
    return model_dir
