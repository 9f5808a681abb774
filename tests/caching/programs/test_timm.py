"""One small model of each of many families of timm, unchanged: the same training with the cache, bit for bit."""

import pytest
import timm

from support.caching.parts import CLASSES, Classifier, images, loader

pytestmark = pytest.mark.slow

MODELS = [
    "cpubone_nano",
    "cs3darknet_focus_s",
    "cspnext_tiny",
    "densenet121",
    "dla46x_c",
    "dpn48b",
    "edgenext_xx_small",
    "efficientvim_m1",
    "efficientvit_b0",
    "ese_vovnet19b_slim_dw",
    "fasternet_t0",
    "fastvit_t8",
    "ghostnet_050",
    "hardcorenas_b",
    "hgnetv2_b0",
    "inception_next_atto",
    "legacy_seresnet18",
    "mobilenetv3_small_050",
    "mobilevit_xxs",
    "poolformerv2_s12",
    "pvt_v2_b0",
    "regnety_002",
    "repghostnet_050",
    "resnest14d",
    "resnetv2_18",
    "rexnet_100",
    "shvit_s1",
    "skresnet18",
    "starnet_s050",
    "test_byobnet",
    "test_convnext",
    "test_efficientnet",
    "test_mambaout",
    "test_nfnet",
    "test_resnet",
    "tiny_vit_5m_224",
    "vit_tiny_patch16_224",
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_the_same_from_entries(compare, name):
    size = {"size": 64} if not name.startswith("vit") else {"size": 224}

    def program(run):
        net = timm.create_model(name, num_classes=CLASSES)
        run.fit(Classifier(net), loader(images(12, channels=3, **size), batch_size=4), schedule={1: 3}, max_epochs=3)

    run = compare(program)
    assert run.caches[-1].stats.hits >= 16
