"""Convert five networks of timm, print the reports, and store one: python examples/convert_timm.py"""

import argparse
import tempfile
from pathlib import Path

import torch

import hyperball as hb

NETWORKS = {
    "timm/resnet18": {"magnitude": "tanh", "pool": "huber(c=1)"},
    "timm/convnext_atto": {"magnitude": "ball", "convolutions": "all_but_first"},
    "timm/mobilenetv3_small_050": {"magnitude": "seg", "angular": "square_cosine"},
    "timm/nf_resnet26": {"magnitude": "log", "projection": "l2_ball(radius=15)"},
    "timm/vit_tiny_patch16_224": {"magnitude": "tanh", "weighting": "linear"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert five networks of timm and print the reports.")
    parser.add_argument("--pretrained", action="store_true", help="timm's weights (downloads them)")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(2, 3, 224, 224)
    for name, conversion in NETWORKS.items():
        model = hb.models.create(name, pretrained=options.pretrained).eval()
        _, report = hb.convert_model(model, magnitude="linear", weighting="linear", batch=x)
        print(f"{name}\n  linearly weighted linear + cosine differs by {report.difference.absolute:.1e}")
        _, report = hb.convert_model(model, **conversion, batch=x)
        print(f"  {report}".replace("\n", "\n  "))
        print()

    converted, _ = hb.convert_model(hb.models.create("timm/resnet18").eval(), magnitude="tanh")
    print(hb.convert.calibrate(converted, [x]))
    print(f"network bounds: {str(hb.bounds(converted)).splitlines()[-1].split(maxsplit=1)[1]}")
    with tempfile.TemporaryDirectory() as folder:
        path = hb.models.save(
            converted, Path(folder) / "resnet18.safetensors", name="timm/resnet18", options={"magnitude": "tanh"}
        )
        again = hb.models.load(path).eval()
        print(f"stored and loaded: difference {float((again(x) - converted(x)).detach().abs().max()):.1e}")


if __name__ == "__main__":
    main()
