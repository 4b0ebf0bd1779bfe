"""What data code refuses with: one line that names the file, what is wrong and what would do."""

import importlib
from types import ModuleType


class DataError(ValueError):
    """A data file is missing, short, corrupt or of another set; or a data set is asked for wrongly."""


class MissingFiles(DataError):
    """Files of a set are not there: a download would do."""


EXTRAS = {"h5py": "train", "sklearn.datasets": "train", "PIL.Image": "train", "torchvision.transforms.v2": "vision"}


def one_line(error: object) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def optional(module: str) -> ModuleType:
    """Import a module that an extra brings, or say which extra that is."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        advice = f"pip install 'hyperball[{EXTRAS[module]}]'"
        raise DataError(f"this data set needs the package {package} ({error}); {advice}") from error
