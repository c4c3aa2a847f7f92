"""Fingerprints: the oracle's bits everywhere, and what they must tell apart."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch
from fingerprint_oracle import BLOCK, ROUND, Copies, bytes_in_memory, distinct, oracle, random_bytes
from kernel_tools import running_on, ways_to_run

from fusedshard import _C
from fusedshard.kernels import FingerprintTable, fingerprints

on_each_backend = pytest.mark.usefixtures("each_backend")
on_one_thread = pytest.mark.usefixtures("one_thread")
AT_ONCE = 32 * BLOCK  # what a thread takes
SIZES = [0, 1, 2, 3, 7, 8, 9, 17 * 257]
SIZES += [edge + by for edge in (ROUND, BLOCK, 2 * BLOCK, AT_ONCE) for by in (-9, -8, -1, 0, 1, 8)]
SIZES += [BLOCK + ROUND, 3 * BLOCK + 5 * ROUND + 4, 2 * AT_ONCE + 77]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many small calls: threads would wait for each other where other processes have the
    cores."""
    with running_on(_C.cpu_variant(), 1):
        yield


@on_each_backend
def test_every_size_on_every_instruction_set_and_thread_count() -> None:
    tensors = [random_bytes(size) for size in SIZES]
    want = [oracle(bytes_in_memory(tensor)) for tensor in tensors]
    for variant, threads in ways_to_run((1, 2, 5)):
        with running_on(variant, threads):
            assert fingerprints(tensors).tolist() == want, (variant, threads)
            assert [fingerprints([tensor]).item() for tensor in tensors] == want


@on_each_backend
@pytest.mark.parametrize("size", [5, ROUND + 3, 2 * BLOCK + 3 * ROUND + 13])
def test_every_alignment(size: int) -> None:
    memory = random_bytes(size + 33)
    views = [memory[offset : offset + size] for offset in range(33)]
    want = [oracle(bytes_in_memory(view)) for view in views]
    assert len(set(want)) == len(want)
    for variant, threads in ways_to_run((1, 2)):
        with running_on(variant, threads):
            assert fingerprints(views).tolist() == want, (variant, threads)


@on_each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype(dtype: torch.dtype) -> None:
    tensor = random_bytes(1000 * dtype.itemsize).bitwise_and_(1).view(dtype)
    views = [tensor, tensor[1:], tensor[3:-5], tensor.view(20, 50), tensor[:0]]
    assert fingerprints(views).tolist() == [oracle(bytes_in_memory(view)) for view in views]
    assert fingerprints([tensor]).item() == fingerprints([tensor.view(torch.uint8)]).item()


@on_each_backend
def test_many_tensors_in_one_call() -> None:
    generator = torch.Generator().manual_seed(7)
    sizes = torch.randint(0, 40, (1000,), generator=generator)
    sizes[::7] = 0
    sizes[500] = 3 * BLOCK
    tensors = list(random_bytes(int(sizes.sum())).split(sizes.tolist()))
    want = [oracle(bytes_in_memory(tensor)) for tensor in tensors]
    for variant, threads in ways_to_run((1, 2, 5)):
        with running_on(variant, threads):
            assert fingerprints(tensors).tolist() == want, (variant, threads)


@on_each_backend
def test_tensors_without_elements() -> None:
    empty = torch.empty(0)
    assert fingerprints([empty, torch.empty(3, 0, 2)]).tolist() == [oracle(b"")] * 2
    assert fingerprints([]).shape == (0,) and fingerprints([]).dtype == torch.int64


def test_memory_order_counts_and_not_the_shape() -> None:
    x = torch.arange(24.0).view(4, 6)
    image = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    answer = fingerprints([x, x.t(), x.flatten(), x.t().contiguous(), image])
    assert answer[0] == answer[1] == answer[2] != answer[3]
    assert answer[4].item() == oracle(bytes_in_memory(image))


# They are sent between ranks and stored: no release may give others.
def test_values_stay_what_they_were() -> None:
    tensors = [torch.empty(0), torch.zeros(1), torch.ones(3, dtype=torch.bfloat16)]
    tensors += [torch.arange(1000, dtype=torch.float64), torch.arange(100_000)]
    assert fingerprints(tensors).tolist() == [
        -5417735806833148549,
        -7339554271069182334,
        -6523149225636695484,
        4040990474366519136,
        8676477839132061309,
    ]


# Some KiB: whole blocks, a whole round behind them, and a part of one.
TAIL = BLOCK + ROUND + 72


@on_one_thread
def test_every_single_bit_counts() -> None:
    original = random_bytes(TAIL)
    copies = Copies(original, 8 * 64)
    one = torch.arange(8, dtype=torch.uint8)
    found = [fingerprints([original])]
    for first in range(0, TAIL, 64):
        places = torch.arange(first, min(first + 64, TAIL))
        rows = torch.arange(8 * len(places))
        flips = (1 << one).repeat(len(places))
        columns = places.repeat_interleave(8)
        copies.changed[rows, columns] ^= flips
        found.append(copies.fingerprints()[: len(rows)])
        copies.changed[rows, columns] ^= flips
    assert distinct(found)


# An element among others of another kind, in every place: so every exchange of the two counts.
PAIRS = {
    "one and zero": (torch.tensor(1.0), torch.tensor(0.0)),
    "x and -x": (torch.tensor(0.37), torch.tensor(-0.37)),
    "0 and -0": (torch.tensor(0.0), torch.tensor(-0.0)),
    "last bit": (torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0))),
    "bf16 x and -x": (torch.tensor(0.5).bfloat16(), torch.tensor(-0.5).bfloat16()),
    "bf16 last bit": (torch.tensor(1.0).bfloat16(), torch.tensor(1.0078125).bfloat16()),
    "codes": (torch.tensor(128, dtype=torch.uint8), torch.tensor(0, dtype=torch.uint8)),
    "fp64 x and -x": (torch.tensor(0.1).double(), torch.tensor(-0.1).double()),
}


@on_one_thread
@pytest.mark.parametrize("pair", PAIRS)
def test_every_place_of_an_element_counts(pair: str) -> None:
    odd, others = PAIRS[pair]
    numel = TAIL // odd.itemsize
    copies = Copies(others.repeat(numel), 512)
    found = [copies.fingerprints()[:1]]
    for first in range(0, numel, 512):
        places = torch.arange(first, min(first + 512, numel))
        rows = torch.arange(len(places))
        copies.changed[rows, places] = odd
        found.append(copies.fingerprints()[: len(rows)])
        copies.changed[rows, places] = others
    assert distinct(found)


# Distances in words: within a round, from lane to lane, from round to round, from block to block.
DISTANCES = [1, 2, 4, 8, 16, 32, 63, 64, 65, 128, 1984, 2047, 2048, 2049, 4096]


@on_one_thread
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_exchanged_elements_of_random_tensors_are_seen(dtype: torch.dtype) -> None:
    numel = 3 * BLOCK // dtype.itemsize
    generator = torch.Generator().manual_seed(3)
    if dtype == torch.uint8:
        original = random_bytes(numel)
    else:
        signs = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
        original = (0.25 * signs).to(dtype)  # exchanges differ in signs alone
    copies = Copies(original, 100)
    unchanged = fingerprints([original])
    for distance in DISTANCES:
        step = distance * 8 // dtype.itemsize
        first = torch.randint(0, numel - step, (100,), generator=generator)
        copies.changed[torch.arange(100), first] = original[first + step]
        copies.changed[torch.arange(100), first + step] = original[first]
        differs = original[first] != original[first + step]
        assert differs.sum() > 25
        assert torch.equal(copies.fingerprints() != unchanged, differs), distance
        copies.restore()


@on_each_backend
def test_exchanged_words_lanes_rounds_and_blocks_are_seen() -> None:
    original = random_bytes(4 * BLOCK).view(torch.int64)
    copies = [original.clone() for _ in range(4)]
    whole = [copy.view(4, 32, 64) for copy in copies]
    whole[0][..., [3, 17]] = whole[0][..., [17, 3]]
    whole[1][:, [0, 31]] = whole[1][:, [31, 0]]
    whole[2][[1, 2]] = whole[2][[2, 1]]
    whole[3][:] = whole[3].flip(0)
    assert distinct([fingerprints([original, *copies])])


@on_each_backend
def test_zeros_behind_count() -> None:
    x = torch.tensor([3.0])
    zeros = [torch.zeros(length) for length in (0, 1, 2, 127, 128, 129, 4095, 4096, 4097, 8192)]
    assert distinct([fingerprints([*zeros, x, *(torch.cat([x, zero]) for zero in zeros[1:])])])


@on_each_backend
def test_a_table_tells_the_present_contents() -> None:
    x, y = torch.zeros(1000), torch.zeros(5)
    table = FingerprintTable([x, y])
    before = table.fingerprints()
    x[999] += 1
    after = table.fingerprints()
    assert (before != after).tolist() == [True, False]
    assert after.tolist() == fingerprints([x, y]).tolist()


def test_a_table_keeps_the_memory_it_reads() -> None:
    param = torch.nn.Parameter(torch.ones(1 << 16))
    table = FingerprintTable([param])
    before = table.fingerprints()
    param.data = torch.zeros(1 << 16)
    gc.collect()
    others = [torch.full((1 << 16,), 7.0) for _ in range(4)]  # where freed memory would be
    assert table.fingerprints().tolist() == before.tolist(), len(others)


def test_answers_are_on_the_host_whatever_the_defaults() -> None:
    x = torch.ones(3)
    want = fingerprints([x]).tolist()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):
            answer = fingerprints([x])
    finally:
        torch.use_deterministic_algorithms(False)
    assert answer.device.type == "cpu" and answer.tolist() == want


def refused(*tensors: torch.Tensor) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        fingerprints([torch.ones(2), *tensors])
    return f"{error.type.__name__} {error.value}"


def test_what_has_no_dense_memory_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.quantization's deprecation
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    x = torch.ones(4, 6)
    gaps = [x[:, ::2], x[:, :3], x[:, :1].expand(4, 6)]
    for tensor in gaps:
        message = refused(torch.ones(3), tensor)
        assert message.startswith("ValueError tensors[2]: got shape (4, ")
        assert f"strides {tensor.stride()}" in message and "contiguous" in message
    for tensor in (x.to_sparse(), quantized):
        assert refused(tensor).startswith("TypeError tensors[1]: got a Tensor of layout torch.")
    for lazy in (torch.ones(3, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(3))):
        assert "tensors[1]: got a lazily negated or conjugated view" in refused(lazy)
    assert "tensors[1]: got device meta" in refused(torch.empty(3, device="meta"))


def test_many_ways_to_cut_the_work_give_one_answer() -> None:
    """Rows that begin and end anywhere in what a thread takes at once."""
    memory = random_bytes(3 * AT_ONCE)
    for cuts in itertools.product((1, BLOCK, AT_ONCE - BLOCK, AT_ONCE), repeat=2):
        tensors = list(memory.split([*cuts, len(memory) - sum(cuts)]))
        want = [fingerprints([tensor]).item() for tensor in tensors]
        for variant, threads in ways_to_run((2, 5)):
            with running_on(variant, threads):
                assert fingerprints(tensors).tolist() == want
