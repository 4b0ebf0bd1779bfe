"""Feeds: batches made many at a time are those of their steps, bit for bit, and leave little to do in a step."""

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from data_reference import cloud_reference, image_reference, order_reference, word_reference
from launches import launches

from hyperball.data import Augment, Batches, Dataset, Samples
from hyperball.training import Recipe
from hyperball.training.sets import ResidentFeed, block_bytes, train_feed

ON_GPU = block_bytes(torch.device("cuda"))


def images(n: int, channels: int = 3, height: int = 8, width: int = 8) -> Samples:
    inputs = torch.randint(256, (n, channels, height, width), dtype=torch.uint8)
    return Samples(inputs, torch.randint(100, (n,)))


def clouds(n: int, points: int = 16) -> Samples:
    return Samples(torch.randn(n, points, 3), torch.randint(10, (n,)))


def batches_of(samples: Samples, size: int, augment: Augment, rank: int = 0, world_size: int = 1) -> Batches:
    return Batches(
        samples, size, augment=augment, shuffle=True, seed=5, drop_last=True, rank=rank, world_size=world_size
    )


IMAGE_AUGMENTS = [
    Augment(),
    Augment("mirror", pad=2, flip=True),
    Augment("zero", pad=3, flip=True),
    Augment("mirror", pad=8),
    Augment("zero", pad=2, flip=True, cutout=3),
    Augment(flip=True),
    Augment(cutout=4),
    Augment(window=5, flip=True),
]
CLOUD_AUGMENTS = [Augment(), Augment(rotate=True), Augment(jitter=0.01), Augment(rotate=True, jitter=0.02)]


def named(value: object) -> str:
    return str(getattr(value, "__name__", value))


CASES = [(images, augment) for augment in IMAGE_AUGMENTS] + [(clouds, augment) for augment in CLOUD_AUGMENTS]


@pytest.mark.parametrize("make, augment", CASES, ids=named)
def test_a_step_of_a_published_size_is_left_with_a_handful_of_operations(
    make: Callable[..., Samples], augment: Augment
) -> None:
    samples, size = (clouds(800, 256), 32) if make is clouds else (images(48 * 128, 3, 32, 32), 128)
    feed = ResidentFeed(batches_of(samples, size, augment), size, most_bytes=ON_GPU)
    feed.set(0, 0)
    counts = [(launches(lambda: feed.set(0, step)), launches(feed.take)) for step in range(1, len(feed))]  # noqa: B023
    assert {taken for _, taken in counts} == {0}
    assert sorted(count for count, _ in counts)[len(counts) // 2] == 2
    assert sum(count for count, _ in counts) / len(counts) < 6


@pytest.mark.parametrize("make, augment", CASES, ids=named)
def test_many_batches_take_as_many_operations_as_one(make: Callable[[int], Samples], augment: Augment) -> None:
    batches = batches_of(make(96), 8, augment)
    batches.draw(0, 0)
    one, many = (launches(lambda: batches.take(batches.draw(0, 0, steps))) for steps in (1, 12))  # noqa: B023
    assert one == many


@pytest.mark.parametrize("augment", IMAGE_AUGMENTS, ids=str)
@pytest.mark.parametrize("height, width", [(8, 8), (10, 9)])
def test_images_of_a_feed_are_those_of_their_definition_to_the_bit(augment: Augment, height: int, width: int) -> None:
    samples = images(40, 3, height, width)
    feed = ResidentFeed(batches_of(samples, 12, augment), 12)
    for epoch, step in [(0, 0), (0, 1), (7, 2)]:
        feed.set(epoch, step)
        found, labels = feed.take()
        chosen = order_reference(40, 5, epoch)[12 * step : 12 * step + 12]
        expected = [image_reference(samples.inputs[i].numpy(), word_reference(5, epoch, i), augment) for i in chosen]
        assert torch.equal(found, torch.from_numpy(np.stack(expected)))
        assert torch.equal(labels, samples.labels[chosen])


@pytest.mark.parametrize("augment", CLOUD_AUGMENTS, ids=str)
def test_clouds_of_a_feed_are_those_of_their_definition(augment: Augment) -> None:
    samples = clouds(20)
    feed = ResidentFeed(batches_of(samples, 6, augment), 6)
    for epoch, step in [(0, 0), (0, 2), (3, 1)]:
        feed.set(epoch, step)
        found, labels = feed.take()
        chosen = order_reference(20, 5, epoch)[6 * step : 6 * step + 6]
        expected = [cloud_reference(samples.inputs[i].numpy(), word_reference(5, epoch, i), augment) for i in chosen]
        torch.testing.assert_close(found.double(), torch.from_numpy(np.stack(expected)), rtol=1e-5, atol=1e-6)
        assert torch.equal(labels, samples.labels[chosen])


WALK = [(0, 0), (0, 1), (0, 2), (0, 5), (0, 5), (0, 3), (1, 6), (1, 0), (1, 1), (0, 6)]


@pytest.mark.parametrize("steps_a_block", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("rank, world_size", [(0, 1), (0, 2), (3, 4)])
@pytest.mark.parametrize("make, augment", [CASES[2], CASES[4], CASES[-1]], ids=named)
def test_a_block_of_any_length_gives_the_batch_of_any_step_of_a_rank(
    make: Callable[[int], Samples], augment: Augment, rank: int, world_size: int, steps_a_block: int
) -> None:
    samples, share = make(60), 8 // world_size
    room = steps_a_block * share * samples.inputs[0].numel() * 4
    feed = ResidentFeed(batches_of(samples, 8, augment, rank, world_size), share, most_bytes=room)
    alone = batches_of(samples, 8, augment, rank, world_size)
    assert len(feed) == 7
    for epoch, step in WALK:
        feed.set(epoch, step)
        inputs, labels = next(alone.epoch(epoch, start_step=step))
        found = feed.take()
        assert torch.equal(found[0], inputs)
        assert torch.equal(found[1], labels)
        assert found[0].stride() == inputs.stride()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batches_lie_at_one_place_in_the_layout_asked_for(channels: int, memory_format: torch.memory_format) -> None:
    batches = batches_of(images(60, channels), 8, Augment("mirror", pad=2, flip=True))
    feed = ResidentFeed(batches, 8, memory_format, most_bytes=0)
    places = set()
    for epoch, step in WALK:
        feed.set(epoch, step)
        inputs, labels = feed.take()
        expected = next(batches.epoch(epoch, start_step=step))[0].contiguous(memory_format=memory_format)
        assert inputs.stride() == expected.stride()
        assert torch.equal(inputs, expected)
        assert inputs.contiguous(memory_format=memory_format).data_ptr() == inputs.data_ptr()
        places.add((inputs.data_ptr(), labels.data_ptr()))
    assert len(places) == 1


def test_a_batch_that_was_written_over_is_whole_when_it_is_set_again() -> None:
    feed = ResidentFeed(batches_of(images(60), 8, Augment(flip=True)), 8)
    feed.set(0, 2)
    before = [part.clone() for part in feed.take()]
    for part in feed.take():
        part.zero_()
    feed.set(0, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, feed.take(), strict=True))


def test_a_block_that_could_not_be_made_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of(images(60), 8, Augment(flip=True))
    feed = ResidentFeed(batches, 8)
    feed.set(1, 0)
    with monkeypatch.context() as broken:
        broken.setattr(batches, "take", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            feed.set(0, 0)
    feed.set(0, 0)
    assert torch.equal(feed.take()[0], next(batches.epoch(0))[0])


def test_blocks_keep_within_their_memory_and_hold_one_step_at_least() -> None:
    batches = batches_of(images(60), 8, Augment())
    for room, steps in [(0, 1), (4 * 8 * 192 * 3, 3), (4 * 8 * 192 * 4 - 1, 3), (2**30, 7)]:
        feed = ResidentFeed(batches, 8, most_bytes=room)
        feed.set(0, 0)
        assert feed.block is not None
        assert len(feed.block[0]) == 8 * steps


def test_feeds_of_the_processes_make_up_the_batch_of_one() -> None:
    train = images(60)
    dataset = Dataset("cifar100", "images", tuple(map(str, range(100))), train, images(10))
    recipe = Recipe(batch_size=8).override({"data.name": "cifar100", "data.crop": "mirror", "data.flip": True})

    def taken(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        feed = train_feed(recipe, dataset, torch.device("cpu"), rank, world_size)
        feed.set(1, 3)
        return feed.take()

    whole, parts = taken(0, 1), [taken(rank, 4) for rank in range(4)]
    for one, shares in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(one, torch.cat(shares))


@pytest.mark.gpu
@pytest.mark.parametrize("make, augment", CASES, ids=named)
def test_feed_on_a_gpu_gives_a_graph_the_batches_of_the_cpu(make: Callable[[int], Samples], augment: Augment) -> None:
    samples = make(60)
    here = ResidentFeed(batches_of(samples, 8, augment), 8)
    layout = torch.channels_last if make is images else torch.contiguous_format
    there = ResidentFeed(batches_of(samples.to("cuda"), 8, augment), 8, layout)
    there.set(0, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs, labels = (part.clone() for part in there.take())
    there.set(1, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there.set(0, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for epoch, step in WALK:
        here.set(epoch, step)
        there.set(epoch, step)
        graph.replay()
        torch.testing.assert_close(inputs.cpu(), here.take()[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(labels.cpu(), here.take()[1])
