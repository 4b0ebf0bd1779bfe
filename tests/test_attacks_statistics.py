"""What docs/robustness.md says of BatchNorm in adversarial training: every pass of an attack counts."""

import pytest
import torch
from torch import nn

from hyperball.training import Recipe
from hyperball.training.objective import Objective


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("method, passes", [("none", 1), ("fgsm", 2), ("fast", 2), ("pgd", 4), ("trades", 6)])
def test_every_pass_of_an_attack_in_training_moves_running_statistics(method, passes):
    trained = network().train()
    recipe = Recipe().override({"adversarial.method": method, "adversarial.iterations": 3})
    Objective(recipe, trained)(trained, torch.rand(4, 1, 8, 8), torch.arange(4) % 3)
    assert int(trained[0].num_batches_tracked) == passes


def test_after_fgsm_running_statistics_are_those_of_clean_and_attacked_images_alike():
    trained, x = network().train(), 0.5 + 0.4 * torch.rand(4, 1, 8, 8)
    seen = []
    trained[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach().mean()))
    recipe = Recipe().override({"adversarial.method": "fgsm", "adversarial.epsilon": 8 / 255})
    Objective(recipe, trained)(trained, x, torch.arange(4) % 3)
    assert seen[0] == x.mean()
    assert seen[1] != x.mean()
    torch.testing.assert_close(trained[0].running_mean[0], torch.stack(seen).mean())
