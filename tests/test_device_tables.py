"""What is kept on a device: brought up to date before each step, and counted there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_backend import STREAM, EmulatedBackend, emulated_kernels
from emulation import load
from kernel_tools import ADAM, ADAMW, tables_of
from oracles import adam_reference_, fresh_state, same_state

from fusedshard.kernels import adam_, check_device
from fusedshard.layout import Segment
from fusedshard.native import BACKENDS
from fusedshard.tables import GroupScalars, StepTables, integers

PARAMS = 500
GRADIENT = torch.ones(PARAMS)  # outlives the tables that point at it


@pytest.fixture
def backend(emulated_module: Path) -> Iterator[EmulatedBackend]:
    with emulated_kernels(emulated_module) as backend:
        yield backend


@pytest.fixture
def control(emulated_module: Path) -> Iterator[Any]:
    """What the emulated devices say of themselves, and are told."""
    control = load(emulated_module).emulation
    yield control
    control.set_kernel_image_error(0)


def many_tables(groups: list[GroupScalars]) -> StepTables:
    """Of 500 parameters of one element: 4,000 words of rows, 500 of use, 8 a group."""
    segments = [Segment(i, 0, i, 1) for i in range(PARAMS)]
    tables = tables_of(segments, 4, groups)
    tables.point_at_shards([GRADIENT])
    return tables


def same_words(tables: StepTables) -> bool:
    return torch.equal(tables.device_words, tables.words)


def test_upload_sends_what_changed(backend: EmulatedBackend, control: Any) -> None:
    tables = many_tables([ADAM])
    tables.upload()
    assert same_words(tables) and tables.device_words is not tables.words
    first = control.launch_count()
    tables.upload()
    assert control.launch_count() == first
    tables.rows[0, 2] += 4  # in the first 480 words
    tables.rows[499, 2] += 4  # in those from 3,840 on
    tables.used[499] = 0  # likewise from 4,320 on
    everything = range(len(tables.words))
    assert [start for start, _ in tables.stretches_to_send(everything)] == [0, 3840, 4320]
    tables.upload()
    assert control.launch_count() == first + 3
    assert same_words(tables) and tables.stretches_to_send(everything) == []


@pytest.mark.parametrize("captured", [False, True])
def test_upload_of_one_bucket(backend: EmulatedBackend, control: Any, captured: bool) -> None:
    """Alone, but for the first time: its rows are of no use without the groups' numbers."""
    backend.graph = captured
    sizes = [2, 70, 3]  # 70 rows are more words than one launch writes
    segments = [[Segment(i, 0, i, 1) for i in range(size)] for size in sizes]
    stretches = [(rows, 4) for rows in segments]
    tables = StepTables(stretches, integers([0] * 70), 1, torch.device("cpu"))
    tables.set_groups([ADAM])
    tables.upload(tables.tables[1])
    assert same_words(tables)
    tables.words += 1
    before = control.launch_count()
    tables.upload(tables.tables[1])
    assert control.launch_count() == before + 2
    other = tables.device_words != tables.words
    assert other.nonzero().flatten().tolist() == [*range(16), *range(72 * 8, len(tables.words))]
    tables.upload()
    assert same_words(tables)


def test_words_whose_upload_failed_are_sent_again(backend: EmulatedBackend, control: Any) -> None:
    tables = many_tables([ADAM])
    tables.upload()
    tables.set_groups([ADAM._replace(lr=0.5)])
    control.set_launch_error(9)
    with pytest.raises(RuntimeError, match="CUDA kernel write_words"):
        tables.upload()
    assert not same_words(tables)
    tables.upload()
    assert same_words(tables)


def test_a_graph_gets_all_words_and_so_do_steps_after_it(
    backend: EmulatedBackend, control: Any
) -> None:
    """A replay brings the words of its capture back."""
    tables = many_tables([ADAM])
    tables.upload()
    launches = -(-len(tables.words) // 480)
    for captured in (True, False, False):
        backend.graph = captured
        before = control.launch_count()
        tables.device_words.zero_()
        tables.upload()
        assert same_words(tables)
        assert control.launch_count() == before + launches


def test_hyperparameters_may_lie_on_the_device(backend: EmulatedBackend) -> None:
    """And are read there at each upload, whatever their dtype."""
    lr, beta1 = torch.tensor([0.5]), torch.tensor(0.25, dtype=torch.float64)
    on_device = ADAMW._replace(lr=lr, beta1=beta1)
    tables = tables_of([Segment(0, 0, 0, 9)], 4, [ADAM, on_device], integers([1]))
    grad = torch.linspace(-1, 1, 9)
    tables.point_at_shards([grad])
    state = fresh_state(torch.ones(9))
    want = fresh_state(torch.ones(9))
    for step, rate in enumerate([0.5, 0.125, 0.0]):
        lr.fill_(rate)
        tables.upload()
        adam_(state, tables.tables[0], integers([step]))
        adam_reference_(want, grad, ADAMW._replace(lr=rate, beta1=0.25), step + 1)
        assert same_state(state, want)
    assert torch.isnan(tables.groups[1, :2]).all() and tables.groups[0, 0] == ADAM.lr


def test_launches_are_on_the_tensors_device_and_stream(
    backend: EmulatedBackend, control: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = many_tables([ADAM])
    monkeypatch.setattr(backend, "where", lambda device: (1, STREAM))
    control.set_device(0)
    tables.upload()
    device, stream, _ = control.last_launch()
    assert (device, stream) == (1, STREAM)
    assert control.current_device() == 0


def test_a_failed_launch_names_its_kernel(backend: EmulatedBackend, control: Any) -> None:
    tables = many_tables([ADAM])
    tables.upload()
    before = fresh_state(torch.ones(PARAMS))
    state = fresh_state(torch.ones(PARAMS))
    control.set_launch_error(9)
    with pytest.raises(RuntimeError, match=r"CUDA kernel adam: .*configuration"):
        adam_(state, tables.tables[0], integers([0] * PARAMS))
    assert same_state(state, before)
    adam_(state, tables.tables[0], integers([0] * PARAMS))  # the error is not reported twice
    assert not same_state(state, before)


def test_a_device_that_is_not_there(
    backend: EmulatedBackend, control: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "where", lambda device: (2, STREAM))
    with pytest.raises(RuntimeError, match="CUDA kernel write_words: invalid device"):
        many_tables([ADAM]).upload()
    with pytest.raises(RuntimeError, match=r"param: got device cpu, .*invalid device"):
        check_device("param", torch.device("cpu"))


def test_an_architecture_that_the_build_does_not_hold(
    backend: EmulatedBackend, control: Any
) -> None:
    control.set_kernel_image_error(209)
    with pytest.raises(RuntimeError) as error:
        check_device("param", torch.device("cpu"))
    for part in ("param: got device", "compute capability 9.0", "90-real", "TORCH_CUDA_ARCH_LIST"):
        assert part in str(error.value)
    assert control.last_error() == 0


def test_a_driver_that_is_older_than_the_build(backend: EmulatedBackend, control: Any) -> None:
    control.set_kernel_image_error(35)
    with pytest.raises(RuntimeError) as error:
        check_device("param", torch.device("cpu"))
    for part in ("its driver knows CUDA 12.4", "made with 13.0", "CUDA_HOME"):
        assert part in str(error.value)


def test_scattered_chunks_are_refused(backend: EmulatedBackend) -> None:
    from fusedshard.kernels import mean_

    room = torch.ones(10, 4)
    with pytest.raises(ValueError, match="chunks: got scattered ones, wanted equal distances"):
        mean_(torch.empty(4), [room[0], room[1], room[5]])


def test_tiles_cover_every_element_once(backend: EmulatedBackend) -> None:
    lengths = [0, 1, 4095, 4096, 4097, 0, 12_289]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    segments = [Segment(i, 0, starts[i], length) for i, length in enumerate(lengths)]
    (table,) = tables_of(segments, 4).tables
    want = [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (6, 0), (6, 1), (6, 2), (6, 3)]
    assert [tuple(tile) for tile in table.tiles.tolist()] == want


def test_buckets_of_one_pattern_share_their_tiles(backend: EmulatedBackend) -> None:
    patterns = [[5000, 9], [5000, 9], [9, 5000]]
    stretches = [
        ([Segment(param, 0, 8192 * param, n) for param, n in enumerate(lengths)], 4)
        for lengths in patterns
    ]
    first, second, other = StepTables(stretches, integers([0, 0]), 1, torch.device("cpu")).tables
    assert first.tiles is second.tiles
    assert first.tiles.tolist() == [[0, 0], [0, 1], [1, 0]]
    assert other.tiles.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_the_cpu_reads_the_tables_where_they_are_written() -> None:
    tables = many_tables([ADAM])
    assert tables.device_words is tables.words
    assert not isinstance(BACKENDS["cpu"], EmulatedBackend)
    assert len(tables.tables[0].tiles) == 0
