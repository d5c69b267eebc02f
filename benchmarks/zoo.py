"""Models to prune, from the libraries that people use: names, models without weights, inputs."""

from __future__ import annotations

import fnmatch
import importlib.util
from typing import Any

import constructs
import packages
import torch
from torch import Tensor, nn


def spots(*shape: int, seed: int = 0) -> Tensor:
    """Soft spots under noise: of pure noise, pooling would leave nothing that tells two apart."""
    generator = torch.Generator().manual_seed(seed)
    soft = torch.randn(*shape[:2], 4, 4, generator=generator)
    noise = torch.randn(shape, generator=generator)
    return 0.5 * noise + nn.functional.interpolate(soft, shape[2:], mode="bilinear")


class Zoo:
    """One library's models."""

    # Globs of those that are not convolutional networks, and of those whose code goes by values.
    transformers: tuple[str, ...] = ("*",)
    by_values: tuple[str, ...] = ()
    why = "for their size"  # some are left out

    def names(self, everything: bool) -> list[str]:
        """Those that a run without ``--models`` takes."""
        raise NotImplementedError

    def left_out(self) -> list[str]:
        return []

    def every(self) -> list[str]:
        """All that can be named."""
        return self.names(True)

    def build(self, name: str) -> nn.Module:
        raise NotImplementedError

    def example(self, name: str, seed: int = 0) -> Any:
        raise NotImplementedError

    def outputs(self, name: str) -> tuple[str, ...] | None:
        """Those that people use, where the model returns its insides too."""
        return None

    def is_one(self, name: str, globs: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


class Torchvision(Zoo):
    """googlenet and inception_v3 are built without their auxiliary heads, which run in training
    only; detection runs in float64, for the order of boxes hangs on the last digits."""

    transformers = ("vit_*", "swin*", "maxvit_*", "mvit_*")
    by_values = ("*rcnn*", "retinanet*", "fcos*", "ssd*")
    largest = 140e6  # parameters; models above are left out unless named

    def every(self) -> list[str]:
        from torchvision.models import list_models

        return [n for n in list_models() if not n.startswith("quantized_")]

    def names(self, everything: bool) -> list[str]:
        kinds = ("classification", "segmentation")
        names = [n for n in self.every() if everything or self._kind(n) in kinds]
        return [n for n in names if self._size(n) <= self.largest]

    def left_out(self) -> list[str]:
        return [n for n in self.every() if self._size(n) > self.largest]

    def build(self, name: str) -> nn.Module:
        from torchvision.models import get_model

        settings: dict[str, Any] = {"weights": None}
        if name in ("googlenet", "inception_v3"):
            settings |= {"init_weights": False, "aux_logits": False}
        if self._kind(name) in ("segmentation", "detection"):
            settings["weights_backbone"] = None
        model = get_model(name, **settings)
        return model.double() if self._kind(name) == "detection" else model

    def example(self, name: str, seed: int = 0) -> Any:
        kind = self._kind(name)
        if kind == "detection":
            return ([spots(1, 3, 320, 320, seed=seed)[0].sigmoid().double()],)
        if kind == "optical_flow":
            return tuple(spots(1, 3, 128, 128, seed=2 * seed + i).tanh() for i in (0, 1))
        if kind == "video":
            side = 112 if name in ("r3d_18", "mc3_18", "r2plus1d_18") else 224
            return spots(16, 3, side, side, seed=seed).transpose(0, 1)[None].contiguous()
        side = 299 if name == "inception_v3" else 256 if name.startswith("swin_v2") else 224
        return spots(1, 3, side, side, seed=seed)

    def _kind(self, name: str) -> str:
        """The torchvision sub-package of a model; "classification" for those at its top."""
        from torchvision.models import get_model_builder

        parts = get_model_builder(name).__module__.split(".")
        return parts[2] if len(parts) > 3 else "classification"

    def _size(self, name: str) -> int:
        from torchvision.models import get_model_weights

        return max((w.meta["num_params"] for w in get_model_weights(name)), default=0)


class Timm(Zoo):
    """A small member of each of 40 families of ``timm``; any other by name."""

    chosen = (
        "beit_base_patch16_224", "eca_botnext26ts_256", "mobileone_s1", "csatv2",
        "deepseek_vit_412m", "densenet264d", "efficientformer_l1", "efficientformerv2_s0",
        "efficientnet_b0", "efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224",
        "focalnet_tiny_srf", "ghostnet_050", "hardcorenas_b", "iformer_t", "inception_v4",
        "levit_384_s8", "maxvit_pico_rw_256", "poolformerv2_s12", "gmlp_ti16_224",
        "mobilenetv5_base", "nest_tiny", "pit_ti_224", "pvt_v2_b0", "qwen3_vit_88m", "rdnet_tiny",
        "repvit_m0_9", "res2next50", "legacy_seresnet18", "starnet_s050",
        "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "tiny_vit_5m_224",
        "twins_svt_small", "vgg11_bn", "vit_tiny_r_s16_p8_224", "samvit_base_patch16_224",
        "vitamin_small_224", "xcit_nano_12_p8_224",
    )  # fmt: skip

    def names(self, everything: bool) -> list[str]:
        return self.every() if everything else list(self.chosen)

    def every(self) -> list[str]:
        import timm

        return timm.list_models()

    def build(self, name: str) -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False).float()

    def example(self, name: str, seed: int = 0) -> Any:
        import timm

        config = timm.get_pretrained_cfg(name)
        size = (3, 224, 224) if config is None else config.input_size
        return spots(1, *size, seed=seed)


TEXT = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 64}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
         "intermediate_size": 128}  # fmt: skip
# Name: (model class, configuration class, its arguments, kinds of inputs).
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", TEXT, "text"),
    "distilbert": ("DistilBertForSequenceClassification", "DistilBertConfig",
                   {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128,
                    "max_position_embeddings": 64}, "text"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128,
              "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1}, "text"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT | {"num_key_value_heads": 2}, "text"),
    "llama_small": ("LlamaForCausalLM", "LlamaConfig",
                    {"vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 8,
                     "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1408,
                     "max_position_embeddings": 256}, "page"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT | {"num_key_value_heads": 2}, "text"),
    "mistral": ("MistralForCausalLM", "MistralConfig", TEXT | {"num_key_value_heads": 2}, "text"),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": 100, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2,
            "num_heads": 4, "decoder_start_token_id": 0}, "both"),
    "vit": ("ViTForImageClassification", "ViTConfig",
            SMALL | {"image_size": 32, "patch_size": 8}, "image"),
    "swin": ("SwinForImageClassification", "SwinConfig",
             {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "image_size": 32,
              "patch_size": 2, "window_size": 4}, "image"),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}, "image"),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig",
                  {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32],
                   "num_attention_heads": [1, 2, 2, 4], "mlp_ratios": [2, 2, 2, 2],
                   "decoder_hidden_size": 32}, "image"),
    "clip": ("CLIPModel", "CLIPConfig",
             {"text_config": TEXT | {"eos_token_id": 1},
              "vision_config": SMALL | {"image_size": 32, "patch_size": 8},
              "projection_dim": 32}, "clip"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig",
                {"vocab_size": 100, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
                 "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
                 "decoder_ffn_dim": 128, "num_mel_bins": 16, "max_source_positions": 32,
                 "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
                 "eos_token_id": 1, "decoder_start_token_id": 2}, "audio"),
}  # fmt: skip


class HuggingFace(Zoo):
    """Tiny configurations of ``transformers``, and by name one that is large enough to time."""

    def names(self, everything: bool) -> list[str]:
        return [n for n in HUGGING_FACE if everything or n != "llama_small"]

    def build(self, name: str) -> nn.Module:
        import transformers

        model, config, settings, _ = HUGGING_FACE[name]
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    def example(self, name: str, seed: int = 0) -> Any:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 100, (1, 12), generator=generator)
        page = torch.randint(2, 8000, (1, 128), generator=generator)
        image = spots(1, 3, 32, 32, seed=seed)
        return {
            "text": {"input_ids": ids}, "page": {"input_ids": page},
            "both": {"input_ids": ids, "decoder_input_ids": ids[:, :7]},
            "image": {"pixel_values": image},
            "clip": {"input_ids": ids, "pixel_values": image},
            "audio": {"input_features": spots(1, 1, 16, 64, seed=seed)[0],
                      "decoder_input_ids": ids[:, :7]},
        }[HUGGING_FACE[name][3]]  # fmt: skip

    def outputs(self, name: str) -> tuple[str, ...] | None:
        return {"t5": ("logits",), "whisper": ("logits",),
                "clip": ("logits_per_image", "logits_per_text")}.get(name)  # fmt: skip


class Constructs(Zoo):
    """Small networks around one construct each (``constructs.py``)."""

    def names(self, everything: bool) -> list[str]:
        return list(constructs.CONSTRUCTS)

    def build(self, name: str) -> nn.Module:
        return constructs.CONSTRUCTS[name][1]()

    def example(self, name: str, seed: int = 0) -> Any:
        return constructs.example(name, seed)


class Packages(Zoo):
    """Networks of other packages (``packages.py``), of those that are installed. rtdetr picks by
    value, in float64 for the reason that detection has; the graph form of yolov10n returns twice
    what is shared, and two inputs of Flux are no batch."""

    by_values = ("rtdetr*", "yolov10n", "*Flux")
    why = "not installed"

    def names(self, everything: bool) -> list[str]:
        return [n for n, package in packages.names() if importlib.util.find_spec(package)]

    def left_out(self) -> list[str]:
        return [n for n, package in packages.names() if not importlib.util.find_spec(package)]

    def build(self, name: str) -> nn.Module:
        model = packages.build(name).requires_grad_(True)
        return model.double() if name.startswith("rtdetr") else model.float()

    def example(self, name: str, seed: int = 0) -> Any:
        x = packages.example(name, spots, seed)
        return x.double() if name.startswith("rtdetr") else x


FAMILIES: dict[str, Zoo] = {"torchvision": Torchvision(), "timm": Timm(),
                            "transformers": HuggingFace(),
                            "constructs": Constructs(), "packages": Packages()}  # fmt: skip


def family_of(name: str) -> Zoo:
    """The first library that has a model of this name."""
    for family in FAMILIES.values():
        if name in family.every():
            return family
    raise KeyError(name)
