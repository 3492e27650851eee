"""Three small transformers in PyTorch, written as other people write them."""

import math

import torch
from torch import nn
from torch.nn import functional


class GPT(nn.Module):
    """Pre-norm, learned positions, erf GELU, fused projections, tied head."""

    def __init__(self, vocab=61, width=24, heads=4, layers=3, context=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.h = nn.ModuleList(GPTBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class GPTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 5 * width)
        self.out = nn.Linear(5 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln_1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(functional.gelu(self.fc(self.ln_2(x))))


class Llama(nn.Module):
    """RMS norm, rotary positions, grouped queries, a gated feed-forward, a window."""

    def __init__(self, vocab=53, width=20, heads=4, kv_heads=2, head=6, ff=36, layers=2, window=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            LlamaLayer(width, heads, kv_heads, head, ff, window) for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        inverse = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        angles = torch.arange(ids.shape[1])[:, None].float() * self.inverse
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class LlamaLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, head, ff, window):
        super().__init__()
        self.heads, self.kv_heads, self.head, self.window = heads, kv_heads, head, window
        self.input_norm = RMSNorm(width)
        self.q_proj = nn.Linear(width, heads * head, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head, bias=False)
        self.o_proj = nn.Linear(heads * head, width, bias=False)
        self.post_norm = RMSNorm(width)
        self.gate = nn.Linear(width, ff, bias=False)
        self.up = nn.Linear(width, ff, bias=False)
        self.down = nn.Linear(ff, width, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attend(self.input_norm(x), cos, sin)
        y = self.post_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def attend(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head).transpose(1, 2)
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head)
        query, key = torch.arange(t)[:, None], torch.arange(t)[None]
        hidden = (key > query) | (key <= query - self.window)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        y = weights @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


class ViT(nn.Module):
    """Convolutions of images with channels first, a group norm, a class token, layer scales."""

    def __init__(self, width=18, heads=3, layers=2, channels=10, groups=2, patch=4, classes=7):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.stem_norm = nn.GroupNorm(groups, channels)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 7, width))
        self.layers = nn.ModuleList(ViTLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = functional.relu(self.stem_norm(self.stem(images)))
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class ViTLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.scale_1 = nn.Parameter(torch.ones(width))
        self.norm_2 = nn.LayerNorm(width, eps=1e-6)
        self.fc_1 = nn.Linear(width, 4 * width)
        self.fc_2 = nn.Linear(4 * width, width)
        self.scale_2 = nn.Parameter(torch.ones(width))

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5, -1)
        y = self.proj((weights @ v).transpose(1, 2).reshape(b, t, c))
        x = x + self.scale_1 * y
        y = self.fc_1(self.norm_2(x))
        return x + self.scale_2 * self.fc_2(y * torch.sigmoid(1.702 * y))


def perturbed(model, seed=0):
    """Returns a model of which no parameter has the value that it started with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
