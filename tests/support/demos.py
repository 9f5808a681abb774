"""Four questions about one paragraph, and small networks that answer them."""

import json
from functools import partial

import torch

from lightning_egeria.demos.question_answering import AnswerFinder, Encoder, QuestionAnswerer
from lightning_egeria.demos.squad import SquadData
from support.models import trainer_of

PLACES = {"Anna": "Rome", "Bert": "Oslo", "Carl": "Lima", "Dora": "Bonn"}


PARAGRAPH_TEXT = "  ".join(f"{name} went to {place}." for name, place in PLACES.items())


def asked(name, **more):
    place = PLACES[name]
    answer = {"text": place, "answer_start": PARAGRAPH_TEXT.index(place)}
    return {"id": name, "question": f"Where did {name} go?", "answers": [answer], **more}


def squad(*questions):
    paragraph = {"context": PARAGRAPH_TEXT, "qas": list(questions)}
    return json.dumps({"version": "1.1", "data": [{"title": "Journeys", "paragraphs": [paragraph]}]})


def data_of(root, **arguments):
    return SquadData(str(root), **{"batch_size": 4, "longest": 64, **arguments})


def encoder():
    torch.manual_seed(0)
    return Encoder(words=200, width=32, layers=2, heads=2, dropout=0.0, longest=64)


def trainer_for(epochs, *callbacks):
    return trainer_of(*callbacks, epochs=epochs, check_val_every_n_epoch=epochs)


def fit(model, root, epochs, *callbacks):
    trainer = trainer_for(epochs, *callbacks)
    trainer.fit(model, datamodule=data_of(root))
    return trainer.callback_metrics


def answerer(**arguments):
    return QuestionAnswerer(AnswerFinder(encoder()), partial(torch.optim.AdamW, lr=3e-3), **arguments)
