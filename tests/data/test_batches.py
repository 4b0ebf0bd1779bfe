"""Batches: a function of seed, epoch and step alone, whatever came before and however many processes share them."""

from itertools import chain

import pytest
import torch

from hyperball.data import Augment, Batches, DataError, Dataset, Draw, Files, Samples, load

AUGMENT = Augment("mirror", pad=2, flip=True, cutout=3)


def numbered(n: int, device: str = "cpu") -> Samples:
    """Images that say which sample they are, in classes by turns."""
    inputs = torch.arange(n).view(n, 1, 1, 1).expand(n, 1, 8, 8).to(torch.uint8)
    return Samples(inputs.contiguous(), torch.arange(n) % 5).to(device)


def random_samples(n: int = 50) -> Samples:
    return Samples(torch.randint(256, (n, 3, 8, 8), dtype=torch.uint8), torch.arange(n) % 5)


def numbers(batches: Batches, epoch: int) -> list[list[int]]:
    return [(255 * images[:, 0, 0, 0]).round().int().tolist() for images, _ in batches.epoch(epoch)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last, sizes", [(False, [16, 16, 16, 2]), (True, [16, 16, 16])])
def test_epoch_goes_through_every_sample_once(shuffle: bool, drop_last: bool, sizes: list[int]) -> None:
    batches = Batches(numbered(50), 16, shuffle=shuffle, drop_last=drop_last)
    found = numbers(batches, 0)
    assert [len(batch) for batch in found] == sizes
    assert len(batches) == len(sizes)
    flat = list(chain.from_iterable(found))
    assert len(set(flat)) == len(flat)
    assert (flat == sorted(flat)) is (not shuffle)


def test_labels_belong_to_their_images() -> None:
    for images, labels in Batches(numbered(50), 7, shuffle=True).epoch(3):
        assert ((255 * images[:, 0, 0, 0]).round().long() % 5).tolist() == labels.tolist()


def test_orders_differ_by_epoch_and_by_seed() -> None:
    orders = [
        numbers(Batches(numbered(50), 50, shuffle=True, seed=seed), epoch)[0] for seed in (0, 1) for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_history_does_not_matter() -> None:
    samples = random_samples()
    used = Batches(samples, 16, augment=AUGMENT, shuffle=True, seed=4)
    for epoch in (5, 0, 2):
        list(used.epoch(epoch))
    torch.rand(1000)
    fresh = Batches(samples, 16, augment=AUGMENT, shuffle=True, seed=4)
    for (a, _), (b, _) in zip(used.epoch(1), fresh.epoch(1), strict=True):
        assert torch.equal(a, b)


def test_batches_leave_the_global_generator_alone() -> None:
    samples, state = random_samples(), torch.get_rng_state()
    list(Batches(samples, 16, augment=AUGMENT, shuffle=True).epoch(0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_epoch_resumes_at_any_step(start: int) -> None:
    batches = Batches(random_samples(), 16, augment=AUGMENT, shuffle=True, seed=9)
    whole, rest = list(batches.epoch(2)), list(batches.epoch(2, start_step=start))
    assert len(rest) == len(whole) - start
    for (a, x), (b, y) in zip(whole[start:], rest):
        assert torch.equal(a, b)
        assert torch.equal(x, y)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("drop_last", [False, True])
def test_parts_of_the_ranks_make_up_the_batch_of_one_process(world_size: int, drop_last: bool) -> None:
    samples = random_samples()

    def make(rank: int, ranks: int) -> Batches:
        return Batches(
            samples, 16, augment=AUGMENT, shuffle=True, seed=1, drop_last=drop_last, rank=rank, world_size=ranks
        )

    parts = [list(make(rank, world_size).epoch(3)) for rank in range(world_size)]
    for step, (images, labels) in enumerate(make(0, 1).epoch(3)):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), images)
        assert torch.equal(torch.cat([part[step][1] for part in parts]), labels)
        sizes = {len(part[step][1]) for part in parts}
        assert max(sizes) - min(sizes) <= (len(labels) < 16)


def test_augmentation_of_a_sample_does_not_depend_on_the_batch_size() -> None:
    samples = random_samples()
    wide = torch.cat([images for images, _ in Batches(samples, 25, augment=AUGMENT).epoch(1)])
    narrow = torch.cat([images for images, _ in Batches(samples, 4, augment=AUGMENT).epoch(1)])
    assert torch.equal(wide, narrow)


def test_augmentation_changes_with_the_epoch() -> None:
    batches = Batches(random_samples(), 50, augment=AUGMENT)
    first, second = (next(batches.epoch(epoch))[0] for epoch in (0, 1))
    assert (first != second).flatten(1).any(1).float().mean() > 0.9


def test_take_of_a_draw_is_the_batch_of_its_step() -> None:
    batches = Batches(random_samples(), 16, augment=AUGMENT, shuffle=True, seed=2, drop_last=True)
    static = Draw(torch.empty(16, dtype=torch.int64), torch.empty(16, dtype=torch.int64))
    for step, (images, labels) in enumerate(batches.epoch(1)):
        for buffer, value in zip(static, batches.draw(1, step)):
            buffer.copy_(value)
        found = batches.take(static)
        assert torch.equal(found[0], images)
        assert torch.equal(found[1], labels)


@pytest.mark.parametrize("rank, world_size", [(0, 1), (1, 4)])
@pytest.mark.parametrize("step, steps", [(0, 1), (0, 4), (1, 2), (3, 1)])
def test_draw_of_several_steps_is_those_of_each_in_a_row(rank: int, world_size: int, step: int, steps: int) -> None:
    batches = Batches(random_samples(), 16, shuffle=True, seed=2, rank=rank, world_size=world_size)
    single = [batches.draw(1, step + ahead) for ahead in range(steps)]
    for found, parts in zip(batches.draw(1, step, steps), zip(*single, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("name", ["digits", "clouds"])
def test_take_compiles_without_a_break(name: str) -> None:
    augment = AUGMENT if name == "digits" else Augment(rotate=True, jitter=0.01, points=64)
    samples = load(name).train
    assert isinstance(samples, Samples)
    batches = Batches(samples, 16, augment=augment, shuffle=True, drop_last=True)
    compiled = torch.compile(batches.take, fullgraph=True, backend="eager")
    for step in range(3):
        draw = batches.draw(0, step)
        assert torch.equal(compiled(draw)[0], batches.take(draw)[0])


BAD_BATCHES = [
    ({"batch_size": 0}, "`batch_size`"),
    ({"batch_size": 15, "world_size": 2}, "multiple of 2, got 15"),
    ({"batch_size": 60, "drop_last": True}, "at most the 50 samples"),
    ({"batch_size": 8, "rank": 1}, "`rank`"),
    ({"batch_size": 8, "rank": -1}, "`rank`"),
    ({"batch_size": 8, "world_size": 0}, "`rank`"),
    ({"batch_size": 8, "seed": -1}, "`seed`"),
    ({"batch_size": 8, "seed": 2**63}, "`seed`"),
]


@pytest.mark.parametrize("options, message", BAD_BATCHES)
def test_impossible_batches_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(numbered(50), **options)  # type: ignore[arg-type]


def test_steps_outside_of_an_epoch_are_refused() -> None:
    batches = Batches(numbered(50), 16)
    with pytest.raises(ValueError, match=r"`start_step` must be in 0\.\.4"):
        batches.epoch(0, start_step=5)
    with pytest.raises(ValueError, match=r"`step` must be in 0\.\.3"):
        batches.draw(0, 4)
    for steps in (0, 4):
        with pytest.raises(ValueError, match=r"`steps` must be in 1\.\.3, what is left of the epoch"):
            batches.draw(0, 1, steps)


def test_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="`epoch` must be >= 0"):
        next(Batches(numbered(50), 16).epoch(-1))


def test_files_are_refused_with_the_way_to_read_them() -> None:
    with pytest.raises(DataError, match="use `stream` or `decode`"):
        Batches(Files((), ()), 1)  # type: ignore[arg-type]


def test_no_samples_are_refused() -> None:
    with pytest.raises(DataError, match="must not be empty"):
        Batches(numbered(0), 1)


@pytest.mark.parametrize("n", [1, 4, 5, 12, 50])
def test_subset_is_balanced_and_keeps_the_order(n: int) -> None:
    labels = torch.tensor([0] * 30 + [1] * 3 + [2] * 17)
    subset = Samples(torch.arange(50).view(50, 1, 1, 1).to(torch.uint8), labels).subset(n)
    counts = torch.bincount(subset.labels, minlength=3).tolist()
    assert sum(counts) == n
    smaller = [min(count, size) for count, size in zip(counts, (30, 3, 17))]
    assert counts == smaller
    assert all(counts[i] >= min(max(counts) - 1, size) for i, size in enumerate((30, 3, 17)))
    values = subset.inputs.flatten().tolist()
    assert values == sorted(values)


@pytest.mark.parametrize("n", [0, -1, 51])
def test_impossible_subset_is_refused(n: int) -> None:
    with pytest.raises(DataError, match=r"`n` must be in 1\.\.50"):
        numbered(50).subset(n)


def test_samples_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="one entry a sample"):
        Samples(torch.zeros(3, 1, 2, 2), torch.zeros(4))


def test_dataset_of_files_has_no_tensors() -> None:
    files = Files((), ())
    dataset = Dataset("some", "images", ("a",), files, files)
    with pytest.raises(DataError, match="use `stream`"):
        dataset.in_memory()


def test_digits_are_the_digits_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    dataset, bunch = load("digits"), load_digits()
    assert dataset.train.inputs.shape == (1437, 1, 8, 8)
    assert torch.cat([dataset.train.labels, dataset.test.labels]).tolist() == bunch.target.tolist()
    inputs = torch.cat([dataset.train.inputs, dataset.test.inputs])[:, 0]
    torch.testing.assert_close(inputs / 255 * 16, torch.from_numpy(bunch.images).float(), atol=0.04, rtol=0)
    assert inputs.max() == 255
    assert dataset.subset(train=100, test=20).train.labels.bincount().tolist() == [10] * 10


@pytest.mark.gpu
def test_captured_graph_replays_the_batches_of_an_epoch() -> None:
    samples = random_samples(256)
    there = Batches(samples.to("cuda"), 32, augment=AUGMENT, shuffle=True, seed=3, drop_last=True)
    here = Batches(samples, 32, augment=AUGMENT, shuffle=True, seed=3, drop_last=True)
    static = Draw(*(value.clone() for value in there.draw(0, 0)))
    there.take(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = there.take(static)
    for step, (expected, targets) in enumerate(here.epoch(1)):
        for buffer, value in zip(static, there.draw(1, step)):
            buffer.copy_(value)
        graph.replay()
        torch.testing.assert_close(images.cpu(), expected, rtol=0, atol=1e-7)
        assert labels.tolist() == targets.tolist()
