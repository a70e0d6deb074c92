"""The fused LoRA layer computes what its formula says, forwards and backwards."""

import pytest
import torch
from torch import nn

from claw_train.training.lora import add_adapters
from claw_train.training.model import load_causal


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def layer(request, qwen3):
    causal = load_causal(qwen3, torch.float32).requires_grad_(False)
    projection = causal.model.layers[0].mlp.down_proj
    if request.param:
        projection.bias = nn.Parameter(torch.linspace(-1, 1, projection.out_features), requires_grad=False)
    add_adapters(causal, rank=3, alpha=6, targets=("down_proj",), seed=0)
    return causal.model.layers[0].mlp.down_proj


def test_a_new_adapter_adds_nothing(layer):
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), layer.get_base_layer()(x), rtol=0, atol=0)


def test_values_and_gradients(layer):
    generator = torch.Generator().manual_seed(0)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        b.copy_(torch.randn(b.shape, generator=generator))
    x = torch.randn(2, 5, layer.in_features, generator=generator, requires_grad=True)
    upstream = torch.randn(2, 5, layer.out_features, generator=generator)
    base = layer.get_base_layer()
    plain = nn.functional.linear(x, base.weight, base.bias) + 2.0 * (x @ a.T @ b.T)
    want = torch.autograd.grad(plain, (x, a, b), upstream)
    fused = layer(x)
    torch.testing.assert_close(fused, plain)
    for got, expected in zip(torch.autograd.grad(fused, (x, a, b), upstream), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
