"""Networks that call a module several times in a step."""

import random

import torch
from torch import nn
from torch.nn import functional as F


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(x))))
        return self.head(F.relu(self.d(F.relu(self.b(F.relu(self.c(x)))))))


class Siamese(nn.Module):
    """Calls most of the network for each of two inputs, with a head for the first between."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone, self.predictor = backbone, nn.Linear(2, 2)

    def forward(self, x, y):
        predicted = self.predictor(self.backbone(x))
        return (predicted - self.backbone(y)) ** 2


class InEachPosition(nn.Module):
    """Calls an encoder and a cell for each position, and a head at the end."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6))
        self.cell, self.middle, self.head = nn.GRUCell(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        state = None
        for position in x.unbind(1):
            state = self.cell(self.encoder(position), state)
        return self.head(self.middle(state))


class SharedEmbedding(nn.Module):
    """An encoder, and a decoder that calls the same embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(16, 8)
        self.out, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, ids):
        encoded = self.encoder(self.embedding(ids)).relu()
        return self.head(self.out(self.decoder(torch.cat([encoded, self.embedding(ids.flip(1))], -1))))


class Alternating(nn.Module):
    """Two layers that take turns."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.b(self.a(x).relu()).relu()
        return self.head(self.c(x))


class RandomCalls(nn.Module):
    """Calls its modules in a random order, some of them several times, each on any result so far."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        modules = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if draw.random() < 0.3 else nn.Linear(4, 4)]
        modules += [nn.Linear(4, 4) for _ in range(draw.randint(2, 6))]
        self.parts, self.head = nn.ModuleList(modules), nn.Linear(4, 2)
        self.parts.extend([nn.LayerNorm(4), nn.ReLU(), nn.Dropout(0.1)])
        self.calls = []
        for made in range(2, draw.randint(6, 16)):
            part = made - 2 if made - 2 < len(modules) and draw.random() < 0.5 else draw.randrange(len(self.parts))
            given = made - 1 if draw.random() < 0.7 else draw.randrange(made)
            self.calls.append((part, given, draw.random()))

    def forward(self, x, y):
        made = [x, y]
        for part, given, kind in self.calls:
            with torch.set_grad_enabled(kind > 0.1):
                made.append(self.parts[part](made[given]))
            if kind > 0.9:
                made[-1] = made[-1] + made[0]
        return self.head(made[-1] + made[-2])
