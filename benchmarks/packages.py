"""Networks of other packages that people use, small where their size can be chosen.

    pip install --no-deps ultralytics segmentation-models-pytorch diffusers monai open-clip-torch \\
        efficientnet-pytorch vit-pytorch pytorchvideo

They may ask for more when they are imported (opencv-python-headless, fvcore, iopath, ftfy, …).
``coverage.py packages`` leaves out those of packages that are not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

YOLO = ("yolov3-tiny", "yolov5n", "yolov6n", "yolov8n", "yolov8n-seg", "yolov8n-pose", "yolov9t",
        "yolov10n", "yolo11n", "yolo12n", "rtdetr-l")  # fmt: skip
SEGMENTATION = {
    "Unet": {}, "UnetPlusPlus": {}, "MAnet": {}, "Linknet": {}, "FPN": {}, "PAN": {}, "UPerNet": {},
    "DeepLabV3Plus": {}, "Segformer": {"encoder_name": "mit_b0"},
    "Unet efficientnet": {"encoder_name": "efficientnet-b0"},
    "Unet scse": {"decoder_attention_type": "scse"},
}  # fmt: skip
_DOWN, _UP = {"block_out_channels": (32, 64), "norm_num_groups": 8}, {"attention_head_dim": 8}
_CODER = {**_DOWN, "down_block_types": ("DownEncoderBlock2D",) * 2,
          "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
_HEADS = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2}
_TEXT = {"context_length": 16, "vocab_size": 100, "width": 64, "heads": 4, "layers": 2}
_VIT = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 64, "depth": 2, "heads": 4,
        "mlp_dim": 128, "dim_head": 16}  # fmt: skip

# Name: (module, class, positional arguments, keyword arguments, kind of input)
NETWORKS: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any], str]] = {
    "diffusers UNet": ("diffusers", "UNet2DConditionModel", (), {
        **_DOWN, **_UP, "sample_size": 32, "cross_attention_dim": 32,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, "denoise"),
    "diffusers AutoencoderKL": ("diffusers", "AutoencoderKL", (), _CODER, "image 32"),
    "diffusers VQModel": ("diffusers", "VQModel", (), {
        **_CODER, "latent_channels": 3, "num_vq_embeddings": 64}, "image 32"),
    "diffusers DiT": ("diffusers", "DiTTransformer2DModel", (), {
        **_HEADS, "sample_size": 16, "patch_size": 2, "num_embeds_ada_norm": 10}, "classes"),
    "diffusers SD3": ("diffusers", "SD3Transformer2DModel", (), {
        **_HEADS, "sample_size": 16, "patch_size": 2, "joint_attention_dim": 32,
        "caption_projection_dim": 64, "pooled_projection_dim": 32, "out_channels": 4,
        "pos_embed_max_size": 16}, "joint"),
    "diffusers Flux": ("diffusers", "FluxTransformer2DModel", (), {
        **_HEADS, "num_attention_heads": 2, "num_layers": 1, "num_single_layers": 1,
        "patch_size": 1, "joint_attention_dim": 32, "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8)}, "flux"),
    "monai UNet": ("monai.networks.nets", "UNet", (), {
        "spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (8, 16, 32),
        "strides": (2, 2), "num_res_units": 2}, "volume 32"),
    "monai UNETR": ("monai.networks.nets", "UNETR", (), {
        "in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 8, "hidden_size": 48,
        "mlp_dim": 96, "num_heads": 4}, "volume 32"),
    "monai SegResNet": ("monai.networks.nets", "SegResNet", (), {"init_filters": 8}, "volume 32"),
    "monai DynUNet": ("monai.networks.nets", "DynUNet", (
        3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), {}, "volume 32"),
    "monai VNet": ("monai.networks.nets", "VNet", (), {}, "volume 32"),
    "open_clip ViT": ("open_clip", "CLIP", (64, {
        "layers": 2, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 64},
        _TEXT), {}, "pair"),
    "open_clip ResNet": ("open_clip", "CLIP", (64, {
        "layers": (1, 1, 1, 1), "width": 16, "image_size": 64}, _TEXT), {}, "pair"),
    "efficientnet_pytorch b0": ("efficientnet_pytorch", "EfficientNet.from_name", (
        "efficientnet-b0",), {}, "image 64"),
    "vit_pytorch ViT": ("vit_pytorch", "ViT", (), _VIT, "image 64"),
    "vit_pytorch SimpleViT": ("vit_pytorch", "SimpleViT", (), _VIT, "image 64"),
    "vit_pytorch CCT": ("vit_pytorch.cct", "CCT", (), {
        "img_size": 64, "embedding_dim": 64, "n_conv_layers": 2, "num_layers": 2, "num_heads": 4,
        "mlp_ratio": 2, "num_classes": 10, "positional_embedding": "learnable"}, "image 64"),
    "vit_pytorch MaxViT": ("vit_pytorch.max_vit", "MaxViT", (), {
        "num_classes": 10, "dim": 16, "dim_conv_stem": 16, "dim_head": 8, "depth": (1, 1),
        "window_size": 4}, "image 64"),
    "torchaudio Tacotron2": ("torchaudio.models", "Tacotron2", (), {
        "n_mels": 20, "n_symbol": 30}, "speech"),
    "torchaudio ConvTasNet": ("torchaudio.models", "ConvTasNet", (), {
        "enc_num_feats": 64, "msk_num_feats": 32, "msk_num_hidden_feats": 64, "msk_num_layers": 3,
        "msk_num_stacks": 2}, "wave"),
    "torchaudio HDemucs": ("torchaudio.models", "HDemucs", (["a", "b"],), {
        "channels": 16, "depth": 4, "nfft": 1024}, "stereo"),
    "pytorchvideo X3D": ("pytorchvideo.models.x3d", "create_x3d", (), {
        "input_clip_length": 4, "input_crop_size": 64}, "clip 64"),
}  # fmt: skip


def names() -> Iterator[tuple[str, str]]:
    """(network, what has to be importable)."""
    yield from ((name, "ultralytics") for name in YOLO)
    yield from ((f"smp {name}", "segmentation_models_pytorch") for name in SEGMENTATION)
    yield from ((name, module.partition(".")[0]) for name, (module, *_) in NETWORKS.items())


def build(name: str) -> nn.Module:
    if name in YOLO:
        ultralytics = importlib.import_module("ultralytics")
        kind = ultralytics.RTDETR if name.startswith("rtdetr") else ultralytics.YOLO
        return kind(f"{name}.yaml").model
    if name.startswith("smp "):
        settings = {"encoder_name": "resnet18", **SEGMENTATION[name.removeprefix("smp ")]}
        kind = getattr(importlib.import_module("segmentation_models_pytorch"), name.split()[1])
        return kind(encoder_weights=None, classes=3, **settings)
    module, kind, args, kwargs, _ = NETWORKS[name]
    made: Any = importlib.import_module(module)
    for part in kind.split("."):
        made = getattr(made, part)
    return made(*args, **kwargs)


def example(name: str, spots: Callable[..., Tensor], seed: int) -> Any:
    """``spots`` makes images: ``spots(*shape, seed=…)``."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if name in YOLO:
        side = 256 if "detr" in name else 128
        return spots(1, 3, side, side, seed=seed)
    if name.startswith("smp "):
        return spots(1, 3, 128, 128, seed=seed)
    kind, _, side = NETWORKS[name][-1].partition(" ")
    n = int(side or 0)
    time, text = torch.tensor([3]), noise(1, 7, 32)
    ids = torch.randint(0, 100, (1, 16), generator=generator)
    return {
        "image": lambda: spots(1, 3, n, n, seed=seed),
        "volume": lambda: noise(1, 1, n, n, n),
        "clip": lambda: noise(1, 3, 4, n, n),
        "denoise": lambda: {"sample": spots(1, 4, 32, 32, seed=seed), "timestep": time,
                            "encoder_hidden_states": text},
        "classes": lambda: {"hidden_states": spots(1, 4, 16, 16, seed=seed), "timestep": time,
                            "class_labels": torch.tensor([1])},
        "joint": lambda: {"hidden_states": spots(1, 4, 16, 16, seed=seed), "timestep": time,
                          "encoder_hidden_states": text, "pooled_projections": noise(1, 32)},
        "flux": lambda: {"hidden_states": noise(1, 16, 4), "encoder_hidden_states": text,
                         "pooled_projections": noise(1, 32), "timestep": torch.tensor([3.0]),
                         "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)},
        "pair": lambda: (spots(1, 3, 64, 64, seed=seed), ids),
        "speech": lambda: (ids[:, :8] % 30, torch.tensor([8]), noise(1, 20, 12),
                           torch.tensor([12])),
        "wave": lambda: noise(1, 1, 2000),
        "stereo": lambda: noise(1, 2, 8192),
    }[kind]()  # fmt: skip
