"""`convert` and `export`: models to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hyperball.cli.parsing import UsageError, parser


def convert(given: Sequence[str]) -> int:
    """`hyperball convert MODEL --magnitude TEXT --out FILE.safetensors`."""
    options = parser("convert")
    options.add_argument(
        "model", metavar="MODEL", help="timm/NAME, torchvision/NAME or a name of `hyperball list models`"
    )
    options.add_argument("--magnitude", metavar="TEXT", help="of the convolutions, such as tanh or 'ball(rho=2)'")
    options.add_argument("--angular", default="cosine", metavar="TEXT", help="(default: cosine)")
    options.add_argument("--weighting", default="none", metavar="TEXT", help="(default: none)")
    options.add_argument("--pool", metavar="PENALTY", help="a robust pooling in place of global average pooling")
    options.add_argument("--projection", metavar="TEXT", help="before the classifier, such as 'l2_ball(radius=15)'")
    options.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="layers that stay; may be repeated"
    )
    options.add_argument("--pretrained", action="store_true", help="with the library's weights, where a network exists")
    options.add_argument("--classes", type=int, metavar="N", help="classes (default: the model's own)")
    options.add_argument("--out", metavar="FILE", help="write the weights to this .safetensors, with a .json beside it")
    own = options.parse_args(given)
    from hyperball import models
    from hyperball.convert import convert_model, save

    if own.out and Path(own.out).suffix != ".safetensors":
        raise UsageError(f"--out must end in .safetensors, got {own.out!r}")
    operator = {key: getattr(own, key) for key in ("magnitude", "angular", "weighting", "pool", "projection")}
    asked = {"pretrained": True} if own.pretrained else {}
    plain = models.create(own.model, own.classes, **asked)
    converted, report = convert_model(plain, **operator, skip=tuple(own.skip), inplace=True)
    print(report)
    if own.out:
        metadata = {"model": own.model, "classes": own.classes, "skip": own.skip, **operator}
        print(f"wrote {save(converted, own.out, metadata=metadata)}")
    return 0


def export(given: Sequence[str]) -> int:
    """`hyperball export RUN --onnx FILE`."""
    options = parser("export")
    options.add_argument(
        "run", metavar="RUN", help="the folder of a run; its network takes images in [0, 1], or clouds"
    )
    options.add_argument("--onnx", required=True, metavar="FILE", help="the .onnx file to write")
    options.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    options.add_argument("--no-freeze", action="store_true", help="keep BatchNorm and filters as they are trained")
    options.add_argument("--no-check", action="store_true", help="do not compare with torch in onnxruntime")
    own = options.parse_args(given)
    from hyperball.convert import export_onnx
    from hyperball.data import Samples
    from hyperball.freeze import freeze
    from hyperball.nn.decoupled import Decoupled
    from hyperball.training import load_model, read_recipe
    from hyperball.training.sets import Source, load_set

    network = load_model(own.run, data_root=own.data_root)
    samples = load_set(read_recipe(own.run).data, Source(own.data_root)).test
    if not isinstance(samples, Samples):
        raise UsageError(
            "networks of image folders cannot be exported by this command; use hyperball.convert.export_onnx"
        )
    example = samples.inputs[:4]
    example = example.float() / 255 if not example.is_floating_point() else example
    decoupled = any(isinstance(part, Decoupled) for part in network.modules())
    model = freeze(network) if decoupled and not own.no_freeze else network
    gap = export_onnx(model, example, own.onnx, check=not own.no_check)
    compared = "" if gap is None else f"; onnxruntime and torch differ by {gap.relative:.1e} of the largest output"
    print(f"wrote {own.onnx}: input {list(example.shape[1:])} with any batch size{compared}")
    return 0
