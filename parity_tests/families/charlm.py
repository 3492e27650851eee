"""The character language model: settings in a dict, one module for each attention head."""

import math

import torch
from torch import nn
from torch.utils.data import Dataset


class CharTokenizer:
    def __init__(self, vocabulary):
        self.token_of = {character: i for i, character in enumerate(vocabulary)}
        self.character_of = dict(enumerate(vocabulary))

    @staticmethod
    def train_from_text(text):
        return CharTokenizer(sorted(set(text)))

    def encode(self, text):
        return torch.tensor([self.token_of[character] for character in text])

    def decode(self, ids):
        return "".join(self.character_of[int(i)] for i in ids)

    def vocabulary_size(self):
        return len(self.token_of)


class TokenIdsDataset(Dataset):
    def __init__(self, data, block_size):
        self.data = data
        self.block_size = block_size

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, position):
        if not 0 <= position < len(self):
            raise IndexError(position)
        end = position + self.block_size
        return self.data[position:end], self.data[position + 1 : end + 1]


class AttentionHead(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, size, bias = config["embedding_dim"], config["head_size"], config["use_bias"]
        self.Q_weights = nn.Linear(width, size, bias=bias)
        self.K_weights = nn.Linear(width, size, bias=bias)
        self.V_weights = nn.Linear(width, size, bias=bias)
        self.dropout = nn.Dropout(config["dropout_rate"])
        context = config["context_size"]
        self.register_buffer("casual_attention_mask", torch.tril(torch.ones(context, context)))

    def forward(self, x):
        length = x.shape[1]
        q, k, v = self.Q_weights(x), self.K_weights(x), self.V_weights(x)
        scores = q @ k.transpose(1, 2) / math.sqrt(k.shape[-1])
        blocked = self.casual_attention_mask[:length, :length] == 0
        weights = scores.masked_fill(blocked, -torch.inf).softmax(dim=-1)
        return self.dropout(weights) @ v


class MultiHeadAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList([AttentionHead(config) for _ in range(config["heads_num"])])
        width = config["embedding_dim"]
        self.linear = nn.Linear(config["heads_num"] * config["head_size"], width)
        self.dropout = nn.Dropout(config["dropout_rate"])

    def forward(self, x):
        return self.dropout(self.linear(torch.cat([head(x) for head in self.heads], dim=-1)))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["embedding_dim"]
        self.linear_layers = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(config["dropout_rate"]),
        )

    def forward(self, x):
        return self.linear_layers(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.multi_head = MultiHeadAttention(config)
        self.layer_norm_1 = nn.LayerNorm(config["embedding_dim"])
        self.feed_forward = FeedForward(config)
        self.layer_norm_2 = nn.LayerNorm(config["embedding_dim"])

    def forward(self, x):
        x = x + self.multi_head(self.layer_norm_1(x))
        return x + self.feed_forward(self.layer_norm_2(x))
