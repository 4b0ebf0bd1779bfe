"""Models by name: the papers' networks, small ones, and any of torchvision's or timm's."""

from hyperball.models.registry import Entry, create, describe, names, register
from hyperball.models.saved import load, save
from hyperball.models.timm_entries import register_with_timm

__all__ = ["Entry", "create", "describe", "load", "names", "register", "register_with_timm", "save"]
