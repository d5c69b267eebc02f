"""Models of Hugging Face stay models of Hugging Face: class, configuration, ``generate``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxprune
from fxprune.modules.running import outputs
from fxprune.proving.proof import largest_error, prove

from .oracle import awake, check, permutation_moves_nothing

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 40}  # fmt: skip
IDS = {"input_ids": torch.randint(2, 50, (2, 9), generator=torch.Generator().manual_seed(1))}


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def mixtral():
    config = transformers.MixtralConfig(
        **TEXT, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def bert():
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_inner=48,
                                     n_positions=40, bos_token_id=0, eos_token_id=1)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5():
    config = transformers.T5Config(vocab_size=50, d_model=32, d_ff=48, d_kv=8, num_layers=2,
                                   num_heads=4, decoder_start_token_id=0)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    llama: {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 1},
    mixtral: {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
              "num_key_value_heads": 1},
    bert: {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2},
    gpt2: {"n_embd": 16, "n_head": 2, "n_inner": 24},
}  # fmt: skip


@pytest.fixture(params=MODELS, ids=lambda build: build.__name__)
def pruned(request):
    torch.manual_seed(0)
    model = awake(request.param())
    model = model.float() if request.param is mixtral else model  # grouped products take no double
    plan = fxprune.plan(model, IDS)
    return request.param, model, plan, plan.apply(model)


def test_the_model_shrinks_and_the_proof_holds(pruned):
    build, model, plan, small = pruned
    assert type(small) is type(model) and prove(plan, model, small, IDS) <= 1e-6  # norms in float32
    body = [sum(p.numel() for n, p in m.named_parameters() if "emb" not in n and "wte" not in n)
            for m in (small, model)]  # fmt: skip
    assert body[0] < 0.4 * body[1]


def test_the_configuration_tells_the_truth(pruned):
    build, model, plan, small = pruned
    for key, value in MODELS[build].items():
        assert getattr(small.config, key) == value != getattr(model.config, key)
    same = {"vocab_size", "num_hidden_layers", "n_layer", "max_position_embeddings", "eos_token_id"}
    for key in same & vars(model.config).keys():
        assert getattr(small.config, key) == getattr(model.config, key)


def test_save_pretrained_goes_round(pruned, tmp_path):
    build, model, plan, small = pruned
    small.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=model.dtype).eval()
    assert largest_error(outputs(small, IDS), outputs(again, IDS)) < 1e-6


@pytest.mark.parametrize("build", [bert, gpt2], ids=lambda build: build.__name__)
def test_permuting_units_moves_no_output(build):
    torch.manual_seed(0)
    model = awake(build())
    inputs = {**IDS, "use_cache": False}  # whose heads would stand in another order
    permutation_moves_nothing(fxprune.plan(model, inputs), model, inputs)


STREAM = {llama: ["*embed_tokens", "*o_proj", "*down_proj"], gpt2: ["*wte", "*wpe", "*c_proj"]}


@pytest.mark.parametrize("build", STREAM, ids=lambda build: build.__name__)
def test_generating_with_the_cache_gives_what_the_masked_model_gives(build):
    torch.manual_seed(0)
    model = awake(build())
    # The stream stays: what its norms would make of fewer channels, no mask can say.
    plan = fxprune.plan(model, IDS, ignore=STREAM[build])
    assert sum(len(g.removed) > 0 for g in plan.groups) == 4 and not plan.approximate
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    wide, small = (m.generate(**IDS, **settings) for m in (plan.mask(model), plan.apply(model)))
    assert wide.shape == (2, 29) and torch.equal(wide, small)


def test_an_encoder_and_a_decoder_shrink_where_only_the_logits_are_asked_for():
    torch.manual_seed(0)
    model = awake(t5())
    inputs = {**IDS, "decoder_input_ids": IDS["input_ids"][:, :4]}
    # The tied head's input is scaled by the stream's width, that of before.
    with pytest.warns(fxprune.PruningWarning, match="model_dim would be 16, not 32"):
        plan = fxprune.plan(model, inputs, outputs="logits")
    small = plan.apply(model)
    assert small.shared.embedding_dim == 16
    assert small.encoder.block[0].layer[1].DenseReluDense.wi.out_features == 24
    assert prove(plan, model, small, inputs) < 1e-6


def test_a_configuration_that_cannot_tell_is_left_and_noted():
    torch.manual_seed(0)
    model = awake(bert())
    with pytest.warns(fxprune.PruningWarning, match="use fxprune.save"):
        plan = fxprune.plan(model, IDS, sparsity={"*layer.0.intermediate*": 0.5})
    assert plan.apply(model).config.intermediate_size == 48
    assert any(what == "config" for what, _ in plan.notes)


def gemma():
    config = transformers.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=8)
    return transformers.GemmaForCausalLM(config)


def neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**TEXT))


@pytest.mark.parametrize(
    ("build", "attention", "why"),
    [
        (gemma, "heads", "scalar_embed_scale"),  # the root of the stream's width
        (bert, "head_dim", "scaling would be"),  # of attention: the root of a head's width
        (neox, "heads", "lm_head gets a bias"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_no_configuration_of_the_right_widths_stands_for_another_function(
    build, attention, why, tmp_path
):
    torch.manual_seed(0)
    model = awake(build())
    with pytest.warns(fxprune.PruningWarning, match=why):
        small = fxprune.prune(model, IDS, attention=attention)
    small.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size"):
        type(model).from_pretrained(tmp_path)


def test_of_numbers_that_differ_those_that_the_code_reads_decide():
    class Config:
        def __init__(self):
            self.width, self.heads = 16, 4

    class Split(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.heads = config, config.heads  # nobody reads heads
            self.size = config.width // config.heads
            self.q, self.k, self.v = (nn.Linear(6, config.width) for _ in "qkv")
            self.out = nn.Linear(config.width, 3)

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
                       for f in (self.q, self.k, self.v))  # fmt: skip
            x = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            return self.out(x.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    x = torch.randn(2, 5, 6).double()
    small = fxprune.prune(awake(Split(Config())), x)
    assert (small.config.width, small.config.heads, small.size) == (8, 2, 4)
    again = Split(small.config).double()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))


def test_what_was_other_already_than_a_model_built_anew_is_not_the_configuration_s_to_say():
    model = bert()
    model.gradient_checkpointing_enable()
    assert fxprune.prune(model, IDS).config.hidden_size < model.config.hidden_size


@pytest.mark.parametrize("how", ["output", "pair"])
def test_a_decoder_in_a_wrapper_that_hands_its_cache_on(how):
    class Wrap(nn.Module):
        def __init__(self, decoder):
            super().__init__()
            self.decoder = decoder

        def forward(self, ids):
            output = self.decoder(input_ids=ids)
            return output if how == "output" else (output.logits, output.past_key_values)

    small = fxprune.prune(Wrap(llama().eval()), IDS["input_ids"])
    attention = small.decoder.model.layers[0].self_attn
    assert attention.k_proj.out_features == (16 if how == "pair" else 8)


class Plain:
    """A configuration of anybody's: numbers, lists of them, and a configuration inside it."""

    def __init__(self, **values):
        vars(self).update(values)


class OfPlain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        first, second = config.sizes
        self.a, self.b = nn.Linear(6, first), nn.Linear(first, second)
        self.c = nn.Linear(second, config.inner.hidden)
        self.out = nn.Linear(config.inner.hidden, 4)

    def forward(self, x):
        return self.out(self.c(self.b(self.a(x).relu()).relu()).relu())


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_in_a_configuration_and_those_inside_it_describe_the_pruned_model(kind):
    config = Plain(sizes=kind((16, 24)), inner=Plain(hidden=20, sizes=kind((1, 2))), _private=16)
    x = torch.randn(3, 6, dtype=torch.float64)
    plan, small = check(OfPlain(config), x)
    assert plan.attributes == {"config.sizes": kind((8, 12)), "config.inner.hidden": 10}
    again = OfPlain(small.config).double()
    again.load_state_dict(small.state_dict())
    assert torch.equal(again(x), small(x))
    assert (config.sizes, config.inner.hidden) == (kind((16, 24)), 20)  # those of the model
