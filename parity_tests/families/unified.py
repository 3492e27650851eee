"""One stack with pluggable parts; masks are added to the scores: 0 allows, -inf blocks."""

import math

import torch
from torch import nn
from torch.nn import functional


class GroupedQueryAttention(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads, dropout=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = d_model // n_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, n_kv_heads * self.head_dim)
        self.W_v = nn.Linear(d_model, n_kv_heads * self.head_dim)
        self.W_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.rotate = None

    def forward(self, q_input, kv_input=None, mask=None):
        kv_input = q_input if kv_input is None else kv_input
        q = self.W_q(q_input).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k = self.W_k(kv_input).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        v = self.W_v(kv_input).unflatten(-1, (self.n_kv_heads, -1)).transpose(1, 2)
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        k, v = (x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        weights = self.dropout(scores.softmax(dim=-1))
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


class MultiHeadAttention(GroupedQueryAttention):
    def __init__(self, d_model, n_heads, dropout=0.0):
        super().__init__(d_model, n_heads, n_heads, dropout)


class MultiQueryAttention(GroupedQueryAttention):
    def __init__(self, d_model, n_heads, dropout=0.0):
        super().__init__(d_model, n_heads, 1, dropout)


class SinusoidalPE(nn.Module):
    def __init__(self, d_model, max_len=8192):
        super().__init__()
        position = torch.arange(max_len).float()[:, None]
        frequency = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * frequency)
        pe[0, :, 1::2] = torch.cos(position * frequency)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[:, : x.shape[1]]


class LearnedPE(nn.Module):
    def __init__(self, d_model, max_len=8192):
        super().__init__()
        self.pe = nn.Embedding(max_len, d_model)

    def forward(self, x):
        return x + self.pe(torch.arange(x.shape[1]))


class RoPE(nn.Module):
    """Turns neighbouring dimensions of queries or keys (B, heads, T, d_k)."""

    def __init__(self, d_k, max_len=8192):
        super().__init__()
        frequency = 1.0 / 10000.0 ** (torch.arange(0, d_k, 2).float() / d_k)
        angle = torch.outer(torch.arange(max_len).float(), frequency)
        self.register_buffer("cos", angle.cos()[None, None])
        self.register_buffer("sin", angle.sin()[None, None])

    def forward(self, x):
        cos, sin = self.cos[:, :, : x.shape[2]], self.sin[:, :, : x.shape[2]]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class ALiBi(nn.Module):
    """The bias (1, n_heads, T, T) of a model without other positions."""

    def __init__(self, n_heads):
        super().__init__()
        power = 1 << (n_heads.bit_length() - 1)
        slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (n_heads - power), 2)]
        self.slopes = slopes

    def forward(self, length):
        position = torch.arange(length)
        distance = (position[None, :] - position[:, None]).abs()
        return torch.stack([-slope * distance for slope in self.slopes])[None]


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff=None, dropout=0.0):
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.net = nn.Sequential(
            nn.Linear(d_model, d_ff),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(d_ff, d_model),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class SwiGLUFFN(nn.Module):
    def __init__(self, d_model, d_ff=None, dropout=0.0):
        super().__init__()
        d_ff = int(8 * d_model / 3) if d_ff is None else d_ff
        self.w_gate = nn.Linear(d_model, d_ff, bias=False)
        self.w_up = nn.Linear(d_model, d_ff, bias=False)
        self.w_down = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.w_down(functional.silu(self.w_gate(x)) * self.w_up(x)))


class TransformerBlock(nn.Module):
    def __init__(self, attention, ffn, d_model, dropout=0.0, pre_norm=True):
        super().__init__()
        self.attention = attention
        self.ffn = ffn
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.pre_norm = pre_norm

    def forward(self, x, mask=None, kv=None):
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.norm1(x), kv, mask))
            return x + self.dropout(self.ffn(self.norm2(x)))
        x = self.norm1(x + self.dropout(self.attention(x, kv, mask)))
        return self.norm2(x + self.dropout(self.ffn(x)))


class Transformer(nn.Module):
    def __init__(
        self,
        vocab_size,
        d_model,
        n_heads,
        n_layers,
        d_ff=None,
        dropout=0.1,
        max_len=8192,
        attn_cls=MultiHeadAttention,
        attn_kw=None,
        ffn_cls=FeedForward,
        pos_enc_cls=SinusoidalPE,
        pre_norm=True,
    ):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, d_model)
        if pos_enc_cls is RoPE:
            self.pos_enc = RoPE(d_model // n_heads, max_len)
        elif pos_enc_cls is ALiBi:
            self.pos_enc = ALiBi(n_heads)
        else:
            self.pos_enc = pos_enc_cls(d_model, max_len)
        self.layers = nn.ModuleList()
        for _ in range(n_layers):
            attention = attn_cls(d_model, n_heads, dropout=dropout, **(attn_kw or {}))
            ffn = ffn_cls(d_model, d_ff, dropout)
            self.layers.append(TransformerBlock(attention, ffn, d_model, dropout, pre_norm))
            if pos_enc_cls is RoPE:
                # The bound method: the tables stay at pos_enc alone in the state dict.
                attention.rotate = self.pos_enc.forward
        self.final_norm = nn.LayerNorm(d_model) if pre_norm else None
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.tok_emb.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens, mask=None):
        x = self.tok_emb(tokens)
        if isinstance(self.pos_enc, ALiBi):
            bias = self.pos_enc(tokens.shape[1])
            mask = bias if mask is None else mask + bias
        elif not isinstance(self.pos_enc, RoPE):
            x = self.pos_enc(x)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x if self.final_norm is None else self.final_norm(x))


def causal_mask(size):
    return torch.full((size, size), -torch.inf).triu(1)


def padding_mask(lengths, max_len):
    padding = torch.arange(max_len)[None, :] >= lengths[:, None]
    # 0 times -inf is NaN: the mask of the code this stands for is wrong where it should allow.
    return (padding.float() * -torch.inf)[:, None, None, :]


def gpt2_small(vocab_size=50257, d_model=768, n_heads=12, n_layers=12, **settings):
    return Transformer(
        vocab_size, d_model, n_heads, n_layers, pos_enc_cls=LearnedPE, pre_norm=True, **settings
    )


def llama_style(vocab_size=32000, d_model=1024, n_heads=16, n_layers=16, n_kv_heads=4, **settings):
    return Transformer(
        vocab_size,
        d_model,
        n_heads,
        n_layers,
        attn_cls=GroupedQueryAttention,
        attn_kw={"n_kv_heads": n_kv_heads},
        ffn_cls=SwiGLUFFN,
        pos_enc_cls=RoPE,
        pre_norm=True,
        **settings,
    )
