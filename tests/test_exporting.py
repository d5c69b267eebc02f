"""A pruned model goes on through PyTorch's own tools: what they make computes what it computes."""

from __future__ import annotations

import copy
import importlib.util
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxprune

from .oracle import awake, difference, run, tensors


class Residual(nn.Module):
    """A width is written in the code, so the pruned model has a forward that fxprune wrote."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.branch, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 16, 5)

    def forward(self, x):
        y = F.softplus(self.norm(self.stem(x)))
        y = y + torch.sigmoid(self.branch(y))
        return self.fc(F.adaptive_avg_pool2d(y, 4).view(-1, 8 * 16))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(torch.tanh(self.lstm(x)[0]))


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=40, return_dict=False,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


MODELS = {
    "cnn": (Residual, torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))),
    "bert": (bert, torch.randint(2, 50, (4, 9), generator=torch.Generator().manual_seed(1))),
    "lstm": (Recurrent, torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))),
}


@pytest.fixture(params=MODELS)
def pruned(request):
    build, x = MODELS[request.param]
    torch.manual_seed(0)
    model = awake(build()).float()
    small = fxprune.prune(model, x)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    return small, x


def skip_where_transformers_needs_a_newer_torch(model):
    if not hasattr(torch.compiler, "is_exporting") and "transformers" in type(model).__module__:
        pytest.skip("transformers asks torch.compiler.is_exporting(), which this PyTorch lacks")


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def test_torch_export(pruned):
    small, x = pruned
    skip_where_transformers_needs_a_newer_torch(small)
    program = torch.export.export(small, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert difference(run(again, x), run(small, x)) < 1e-6
    shapes = {name: p.shape for name, p in small.named_parameters()}
    assert {name: p.shape for name, p in program.named_parameters()} == shapes


def test_torch_export_for_any_batch(pruned):
    small, x = pruned
    skip_where_transformers_needs_a_newer_torch(small)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(small, (x,), dynamic_shapes=({0: batch},)).module()
    for other in (x[:2], torch.cat([x, x, x])):
        assert difference(run(exported, other), run(small, other)) < 1e-5


@needs("onnxruntime")
@needs("onnxscript")
@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="PyTorch 2.6 cannot write these as ONNX before pruning either"
)
def test_onnx_runtime_computes_the_same(pruned, tmp_path):
    import onnxruntime

    small, x = pruned
    skip_where_transformers_needs_a_newer_torch(small)
    file = str(tmp_path / "small.onnx")
    batch = torch.export.Dim("batch", min=2, max=64)
    torch.onnx.export(small, (x,), file, dynamo=True, dynamic_shapes=({0: batch},))
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for other in (x, x[:2]):
        found = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        assert difference([torch.from_numpy(y) for y in found], run(small, other)) < 1e-5


@pytest.mark.parametrize("backend", [
    "aot_eager", pytest.param("inductor", marks=pytest.mark.slow),
])  # fmt: skip
def test_torch_compile_forward_and_backward(pruned, backend):
    small, x = pruned
    skip_where_transformers_needs_a_newer_torch(small)
    torch.compiler.reset()
    compiled = torch.compile(small, backend=backend)
    assert difference(run(compiled, x), run(small, x)) < 1e-5
    gradients = []
    for model in (small, compiled):
        small.zero_grad()
        tensors(model(x))[0].square().mean().backward()
        gradients.append([p.grad.clone() for p in small.parameters() if p.grad is not None])
    assert difference(*gradients) < 1e-5


def test_torch_jit_trace(pruned):
    small, x = pruned
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(small, x), file)
    file.seek(0)
    assert difference(run(torch.jit.load(file), x), run(small, x)) < 1e-6


def lstms_run_in_bfloat16() -> bool:
    """Some processors have none: PyTorch's own layer says so."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError:
        return False
    return True


def test_autocast_forward_and_backward(pruned):
    small, x = pruned
    if any(isinstance(m, nn.LSTM) for m in small.modules()) and not lstms_run_in_bfloat16():
        pytest.skip("PyTorch has no LSTM in bfloat16 for this processor")
    expected = tensors(small(x))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tensors(small(x))[0]
    assert found.dtype == torch.bfloat16
    assert difference([found.float()], [expected]) < 0.05
    found.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all()
               for p in small.parameters() if p.grad is not None)  # fmt: skip


@pytest.fixture
def one_process(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch was built without gloo",
)
def test_distributed_data_parallel_takes_the_same_step(pruned, one_process):
    small, x = pruned
    steps = []
    weights = {k: v.clone() for k, v in small.state_dict().items()}
    for wrap in (lambda m: m, nn.parallel.DistributedDataParallel):
        small.load_state_dict(weights)
        small.zero_grad()
        model = wrap(small)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tensors(model(x))[0].square().mean().backward()
        optimizer.step()
        steps.append([p.detach().clone() for p in small.parameters()])
    assert difference(*steps) < 1e-6
    assert difference(steps[0], [weights[name] for name, _ in small.named_parameters()]) > 0


DYNAMIC = "torch.ao.quantization.quantize_dynamic is not in this PyTorch"


@pytest.mark.filterwarnings("ignore:.*quantization")
@pytest.mark.skipif(not hasattr(torch.ao.quantization, "quantize_dynamic"), reason=DYNAMIC)
def test_dynamic_quantization_of_its_linear_and_recurrent_layers(pruned):
    small, x = pruned
    quantized = torch.ao.quantization.quantize_dynamic(small, {nn.Linear, nn.LSTM})
    assert any("quantized" in type(m).__module__ for m in quantized.modules())
    assert 0 < difference(run(quantized, x), run(small, x)) < 0.1


@needs("torchao")
def test_torchao_quantizes_its_linear_layers(pruned):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    small, x = pruned
    quantized = copy.deepcopy(small)
    quantize_(quantized, Int8WeightOnlyConfig())
    assert 0 < difference(run(quantized, x), run(small, x)) < 0.1
    with pytest.raises(fxprune.ModelError, match="prune first, then quantize"):
        fxprune.prune(quantized, x)
