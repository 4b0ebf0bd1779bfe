"""Families of networks for the tests of the converter, with random weights that leave no branch silent."""

import torch
from torch import nn

import hyperball as hb

# Name and image size; small members of their families.
FAMILIES = {
    "torchvision/resnet18": 64,
    "torchvision/regnet_x_400mf": 64,
    "torchvision/efficientnet_b0": 64,
    "torchvision/mobilenet_v2": 64,
    "torchvision/mobilenet_v3_small": 64,
    "torchvision/convnext_tiny": 64,
    "torchvision/densenet121": 64,
    "torchvision/googlenet": 64,
    "torchvision/inception_v3": 96,
    "torchvision/squeezenet1_1": 64,
    "torchvision/shufflenet_v2_x0_5": 64,
    "torchvision/mnasnet0_5": 64,
    "timm/resnetv2_50x1_bit": 64,
    "timm/nf_resnet26": 64,
    "timm/nf_regnet_b0": 64,
    "timm/regnety_002": 64,
    "timm/tf_efficientnet_b0": 64,
    "timm/tf_mobilenetv3_small_100": 64,
    "timm/convnextv2_atto": 64,
    "timm/vit_tiny_patch16_224": 224,
    "timm/skresnet18": 64,
    "timm/ghostnet_050": 64,
    "timm/repvgg_a0": 64,
    "timm/mixnet_s": 64,
    "timm/edgenext_xx_small": 64,
    "timm/lcnet_050": 64,
}
SLOW_FAMILIES = {
    "torchvision/resnet50": 64,
    "torchvision/vgg11": 64,
    "torchvision/alexnet": 64,
    "torchvision/vit_b_32": 224,
    "torchvision/swin_t": 64,
    "timm/dm_nfnet_f0": 64,
    "timm/densenet121": 64,
    "timm/swin_tiny_patch4_window7_224": 224,
    "timm/xception41": 64,
    "timm/dla34": 64,
    "timm/hrnet_w18_small": 64,
    "timm/resnest14d": 64,
    "timm/res2net50_26w_4s": 64,
    "timm/coatnet_nano_rw_224": 224,
    "timm/cspresnet50": 64,
    "timm/poolformer_s12": 64,
    "timm/fastvit_t8": 64,
    "timm/vovnet39a": 64,
}


@torch.no_grad()
def family(name: str, **options) -> nn.Module:
    """The network in evaluation mode, with gains and biases away from 0 and 1, and statistics of noise images."""
    model = hb.models.create(name, num_classes=10, **options).eval()
    for path, parameter in model.named_parameters():
        if parameter.dim() == 0 or parameter.numel() == parameter.shape[0]:
            center = 0.0 if path.endswith("bias") else 1.0
            parameter.copy_(center + 0.1 * torch.randn_like(parameter))
        elif not bool(parameter.any()):
            parameter.normal_(std=0.02)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        size = {**FAMILIES, **SLOW_FAMILIES}.get(name, 64)
        hb.convert.calibrate(model, [torch.randn(4, 3, size, size)])
    return model
